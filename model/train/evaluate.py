"""Evaluation: loss over a file; BLEU and chrF of generated answers to a fixed part of it.

Each rank evaluates a share, and the results are reduced once, at the end. When a rank runs out of memory, all ranks
go on with the rest of their shares in smaller parts.
"""

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from sacrebleu.metrics import BLEU, CHRF

from model.data.length_histogram import histogram
from model.data.packing import cut
from model.data.sampler import permute
from model.generate.answers import answer, answering
from model.memory.oom_policy import plan_after_out_of_memory, shrink_plan
from model.nn.t5.batch import collate
from model.nn.t5.huggingface import as_hugging_face
from model.runtime import fault_injection
from model.runtime.device_memory import is_out_of_memory
from model.runtime.distributed import gather_json, sum_over_ranks, vote
from model.runtime.watchdog import stop_asked


@dataclass(frozen=True)
class Answer:
    prompt: str
    answer: str
    reference: str


@contextmanager
def evaluating(model):
    """Context manager: no dropout and no gradients inside."""
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train()


def evaluate_loss(ranks, model, store, plan, start_id, step=0, note=lambda kind, **values: None):
    """Mean cross-entropy per target token of `store` in nats, each pair counted once; None if a stop was asked.

    `note(kind, **values)` is called for each out of memory. Raises NothingFits if the smallest plan does not fit.
    """

    def loss_of(part, plan):
        fault_injection.fire("evaluate", step)
        micro_batch = collate(store, part, start_id, ranks.device, model.uses_kernels)
        return model(micro_batch, plan.chunk_tokens).item(), len(micro_batch.labels)

    def cut_up(ids, plan):
        return cut(ids, store.lengths[ids], plan.micro_batch_tokens)

    def shrink(plan):
        plan = replace(plan, gradient_checkpointing=True, graphs=False)  # neither has an effect without a backward
        return shrink_plan(plan, histogram(store.lengths).longest)

    share_ids = np.arange(ranks.rank, len(store), ranks.world_size)
    note = partial(note, step=step, where="evaluate")
    with evaluating(model):
        losses = _whole_share(ranks, share_ids, plan, cut_up, loss_of, shrink, note)
    if losses is None:
        return None
    total = torch.tensor(losses, dtype=torch.float64).reshape(-1, 2).sum(0)  # loss, target tokens
    loss, target_tokens = sum_over_ranks(ranks, total.to(ranks.device)).tolist()
    return loss / target_tokens


def _whole_share(ranks, ids, plan, cut_up, work, shrink, note):
    """List of work(part, plan) over the parts of `cut_up(ids, plan)`; None if any rank was asked to stop.

    After an out of memory on any rank, all ranks go on with the parts that are left: first with the same plan, then
    with `shrink(plan)`. Raises NothingFits if the smallest plan does not fit.
    """
    done, failures = [], 0
    while True:
        values, ids = _until_out_of_memory(ids, plan, cut_up, work)
        done += values
        failed, stop = vote(ranks, (ranks.rank + 1) * bool(len(ids)), stop_asked())
        if stop:
            return None
        if not failed:
            return done
        failures += 1
        smaller = plan_after_out_of_memory(ranks.device, plan, failures, shrink)
        note("oom", rank=failed - 1, before=asdict(plan), after=asdict(smaller))
        plan = smaller


def _until_out_of_memory(ids, plan, cut_up, work):
    """(values of the finished parts, ids of the rest, left because memory ran out or a stop was asked)."""
    values, parts = [], list(cut_up(ids, plan))
    try:
        while parts and not stop_asked():
            values.append(work(parts[0], plan))
            parts.pop(0)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return values, np.concatenate(parts) if parts else ids[:0]


def answer_pairs(
    ranks, hf_model, store, tokenizer, plan, num_pairs, max_new_tokens, compute_dtype, step=0,
    note=lambda kind, **values: None,
):  # fmt: skip
    """List of Answer to `num_pairs` prompts of `store`, decoded greedily; None if a stop was asked.

    The prompts are the same at every call, and every rank gets all answers. `hf_model` is transformers' T5 on the
    model's own tensors; generation ends at the tokenizer's EOS, in batches of `plan.answers`. `note` is called for each
    out of memory. Raises NothingFits if an answer by itself does not fit.
    """

    def answers_to(part, _):
        fault_injection.fire("generate", step)
        return answer(hf_model, store, tokenizer, part, max_new_tokens)

    def cut_up(ids, plan):
        return [ids[start : start + plan.answers] for start in range(0, len(ids), plan.answers)]

    def shrink(plan):
        return replace(plan, answers=plan.answers // 2) if plan.answers > 1 else None

    chosen = permute(np.arange(min(num_pairs, len(store))), len(store), "answers")
    share_ids = chosen[ranks.rank :: ranks.world_size]
    share_ids = share_ids[np.argsort(store.lengths[share_ids][:, 0], kind="stable")]
    note = partial(note, step=step, where="generate")
    with answering(ranks, compute_dtype):
        answers = _whole_share(ranks, share_ids, plan, cut_up, answers_to, shrink, note)
    if answers is None:
        return None
    return [Answer(*fields) for rank in gather_json(ranks, answers) for part in rank for fields in part]


def score(answers):
    """Dict of BLEU-4 on characters and chrF of `answers`, both 0 to 100 (sacrebleu)."""
    hypotheses, references = [a.answer for a in answers], [[a.reference for a in answers]]
    return dict(
        bleu=BLEU(tokenize="char").corpus_score(hypotheses, references).score,
        chrf=CHRF().corpus_score(hypotheses, references).score,
    )


def measure(run, plan, step=0, note=lambda kind, **values: None):
    """Dict of the validation loss, and of BLEU and chrF if config.bleu_pairs is not 0; None if a stop was asked.

    `note(kind, **values)` is called for each out of memory. Raises NothingFits if the smallest plan does not fit.
    """
    model, config = run.model, run.config
    loss = evaluate_loss(run.ranks, model, run.validation, plan, run.tokenizer.pad_id, step, note)
    if loss is None or not config.bleu_pairs:
        return loss if loss is None else dict(loss=loss)
    answers = answer_pairs(
        run.ranks, as_hugging_face(model, run.tokenizer), run.validation, run.tokenizer, plan, config.bleu_pairs,
        config.max_new_tokens, model.compute_dtype, step, note,
    )  # fmt: skip
    return None if answers is None else dict(loss=loss, **score(answers))
