"""Greedy answers to a batch of prompts, with transformers' generate."""

from contextlib import contextmanager

import numpy as np
import torch

from model.runtime.watchdog import stop_asked


@contextmanager
def answering(ranks, compute_dtype):
    """Context without gradients and with autocast to `compute_dtype` (none for float32)."""
    with torch.inference_mode(), torch.autocast(ranks.device.type, compute_dtype, compute_dtype != torch.float32):
        yield


def answer(hf_model, store, tokenizer, ids, max_new_tokens):
    """[(prompt, greedy answer, reference)] as text, for the examples `ids` of a TokenStore.

    Generates at most `max_new_tokens` tokens per answer, fewer once a stop is requested.
    """
    prompts, references = (_split(flat, store.lengths[ids][:, i]) for i, flat in enumerate(store.tokens(ids)))
    prompt_ids = torch.full((len(ids), max(map(len, prompts))), tokenizer.pad_id)
    # made from the lengths, because the pad token may also be the EOS that ends each prompt
    mask = torch.zeros_like(prompt_ids)
    for i, prompt in enumerate(prompts):
        prompt_ids[i, : len(prompt)], mask[i, : len(prompt)] = torch.from_numpy(prompt), 1
    out = hf_model.generate(
        prompt_ids.to(hf_model.device), attention_mask=mask.to(hf_model.device),
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1,
        stopping_criteria=[lambda ids, _scores: torch.full((len(ids),), stop_asked(), device=ids.device)],
    )  # fmt: skip
    texts = [[tokenizer.decode(list(ids)) for ids in side] for side in (prompts, out.tolist(), references)]
    return list(zip(*texts, strict=True))


def _split(flat, lengths):
    return np.split(flat, np.cumsum(lengths.astype(np.int64))[:-1])
