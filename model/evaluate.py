"""How good the model is: loss over a file; BLEU and chrF of generated answers over a fixed part of it.

Each rank takes a share and no collective stands inside a loop: one reduction at the end.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from sacrebleu.metrics import BLEU, CHRF

from model import faults
from model.batches import collate, cut, permute
from model.ranks import gather_json, sum_over_ranks, vote
from model.watch import stop_asked

ANSWERS_A_BATCH = 32


@dataclass(frozen=True)
class Answer:
    prompt: str
    answer: str
    reference: str


@contextmanager
def evaluating(model):
    """No dropout and no gradient inside."""
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train()


def evaluate_loss(ranks, model, store, plan, start_id, step=0):
    """Mean cross-entropy a target token of `store` in nats, each pair counted once; None if a stop was asked."""
    mine = np.arange(ranks.rank, len(store), ranks.world_size)
    total = torch.zeros(2, dtype=torch.float64)  # loss, target tokens
    with evaluating(model):
        for part in cut(mine, store.lengths[mine], plan.micro_batch_tokens):
            if stop_asked():
                break
            faults.fire("evaluate", step)
            micro_batch = collate(store, part, start_id, ranks.device, model.uses_kernels)
            loss = model(micro_batch, plan.chunk_tokens)
            total += torch.tensor([loss.item(), len(micro_batch.labels)], dtype=torch.float64)
    if vote(ranks, stop_asked())[0]:
        return None
    loss, target_tokens = sum_over_ranks(ranks, total.to(ranks.device)).tolist()
    return loss / target_tokens


def answer_pairs(ranks, stock_model, store, tokenizer, num_pairs, max_new_tokens, compute_dtype, step=0):
    """Greedy answers to the same `num_pairs` prompts of `store` at every call, on every rank; None if a stop was asked.

    `stock_model` is transformers' T5 on the model's own tensors; generation ends at the tokenizer's EOS.
    """
    chosen = permute(np.arange(min(num_pairs, len(store))), len(store), "answers")
    mine = chosen[ranks.rank :: ranks.world_size]
    mine = mine[np.argsort(store.lengths[mine][:, 0], kind="stable")]
    answers = []
    with torch.inference_mode(), torch.autocast(ranks.device.type, compute_dtype, compute_dtype != torch.float32):
        for start in range(0, len(mine), ANSWERS_A_BATCH):
            if stop_asked():
                break
            faults.fire("generate", step)
            answers += _answer(stock_model, store, tokenizer, mine[start : start + ANSWERS_A_BATCH], max_new_tokens)
    if vote(ranks, stop_asked())[0]:
        return None
    return [Answer(*fields) for part in gather_json(ranks, answers) for fields in part]


def _answer(stock_model, store, tokenizer, ids, max_new_tokens):
    prompts, references = (_split(flat, store.lengths[ids][:, i]) for i, flat in enumerate(store.tokens(ids)))
    prompt_ids = torch.full((len(ids), max(map(len, prompts))), tokenizer.pad_id)
    for row, prompt in zip(prompt_ids, prompts, strict=True):
        row[: len(prompt)] = torch.from_numpy(prompt)
    prompt_ids = prompt_ids.to(stock_model.device)
    mask = prompt_ids != tokenizer.pad_id
    out = stock_model.generate(
        prompt_ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1,
        stopping_criteria=[lambda ids, _scores: torch.full((len(ids),), stop_asked(), device=ids.device)],
    )  # fmt: skip
    texts = [[tokenizer.decode(list(ids)) for ids in side] for side in (prompts, out.tolist(), references)]
    return list(zip(*texts, strict=True))


def _split(flat, lengths):
    return np.split(flat, np.cumsum(lengths.astype(np.int64))[:-1])


def score(answers):
    """BLEU-4 on characters and chrF of `answers`, both 0 to 100 (sacrebleu)."""
    hypotheses, references = [a.answer for a in answers], [[a.reference for a in answers]]
    return dict(
        bleu=BLEU(tokenize="char").corpus_score(hypotheses, references).score,
        chrf=CHRF().corpus_score(hypotheses, references).score,
    )
