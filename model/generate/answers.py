"""Greedy answers of a batch of prompts, by transformers' generate on the model's own tensors."""

from contextlib import contextmanager

import numpy as np
import torch

from model.runtime.watchdog import stop_asked


@contextmanager
def answering(ranks, compute_dtype):
    """No gradient inside, and products in `compute_dtype`."""
    with torch.inference_mode(), torch.autocast(ranks.device.type, compute_dtype, compute_dtype != torch.float32):
        yield


def answer(hf_model, store, tokenizer, ids, max_new_tokens):
    """[(prompt, greedy answer, reference)] of the examples `ids`, as text."""
    prompts, references = (_split(flat, store.lengths[ids][:, i]) for i, flat in enumerate(store.tokens(ids)))
    prompt_ids = torch.full((len(ids), max(map(len, prompts))), tokenizer.pad_id)
    mask = torch.zeros_like(prompt_ids)  # from the lengths: the pad token may also be the EOS that ends each prompt
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
