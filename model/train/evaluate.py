"""Evaluation: loss over a file; what generated answers to a fixed part of it are like.

Each rank evaluates a share, and the results are reduced once, at the end. When a rank runs out of memory, all ranks
go on with the rest of their shares in smaller parts.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from model.data.packing import cut
from model.data.sampler import permute
from model.data.shown_questions import shown_questions
from model.data.tokenizer import ChatTokenizer
from model.generate.answer_quality import LOOP_TOKENS, Answer, measures, repeats
from model.generate.engine import Limits, generate
from model.generate.sampling import GREEDY, Sampling
from model.memory.oom_policy import plans_to_try, shrink_plan
from model.nn.base import LanguageModel
from model.runtime import fault_injection
from model.runtime.activity import advance, now_doing
from model.runtime.device_memory import within_memory
from model.runtime.distributed import Ranks, gather_json, sum_over_ranks, vote
from model.runtime.watchdog import stop_asked
from model.train.examples import ROWS_AT_A_TIME, Examples
from model.train.weighted_loss import means_by_name

ROUNDS_A_PART = 8  # answers in a slot, one after the other, that an out of memory can lose
NUM_SAMPLES = 3  # answers that are shown
SAMPLE_CHARACTERS = 400  # most of a text in a journal, which keeps all samples of a run
EPOCH = 0  # of an evaluation: what an objective draws at random is the same each time


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and how."""

    ranks: Ranks
    model: LanguageModel
    examples: Examples
    tokenizer: ChatTokenizer
    num_answers: int  # 0: none are generated
    max_new_tokens: int  # of one answer
    sampling: Sampling = GREEDY

    @property
    def share_ids(self):
        """The rows whose loss this rank computes."""
        return np.arange(self.ranks.rank, len(self.examples), self.ranks.world_size)

    @cached_property
    def share_characters(self):
        """Characters of the targets of the rank's share, counted once; 0 if its loss is no mean over target tokens."""
        return target_characters(self.examples, self.share_ids, self.tokenizer)


@dataclass(frozen=True)
class Parts:
    """How a share of the examples is worked on in parts."""

    cut: Callable  # (ids, plan) -> arrays of ids
    value: Callable  # (array of ids, plan) -> the value of a part
    shrink: Callable  # (plan) -> a smaller plan, or None


@contextmanager
def evaluating(model):
    """Context manager: no dropout and no gradients inside."""
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train()


def metric_sums(model, examples, ids, chunk_tokens):
    """float64 (2, metrics): the metric sums of the rows `ids`, and what they are divided by."""
    batch = examples.batch(ids, EPOCH).to(model.device)
    _, sums = examples.objective.losses(model, batch, chunk_tokens)
    _, weights = examples.weights(ids, EPOCH)
    return torch.stack([sums.double().cpu(), torch.tensor(weights, dtype=torch.float64)])


def target_characters(examples, ids, tokenizer):
    """Characters of the decoded targets of the rows `ids`; 0 where the loss is not divided by their tokens."""
    characters = 0
    for start in range(0, len(ids), ROWS_AT_A_TIME):
        part = ids[start : start + ROWS_AT_A_TIME]
        sequences = examples.sequences(part, EPOCH)
        targets, ends = sequences.columns[-1], np.cumsum(sequences.lengths[:, -1])[:-1]
        is_target = np.ones(len(targets), bool) if sequences.is_target is None else sequences.is_target
        if examples.weights(part, EPOCH)[1][0] != is_target.sum():
            return 0
        split = (np.split(each, ends) for each in (targets, is_target))
        characters += sum(map(len, tokenizer.decode_batch([ids[kept] for ids, kept in zip(*split, strict=True)])))
    return characters


def evaluate_loss(evaluation, plan, step=0, note=lambda kind, **values: None):
    """{metric: its mean over the examples, each counted once}, and nats_per_char; None if a stop was asked.

    nats_per_char is the loss of all target tokens, the EOS among them, divided by the characters of their text, so it
    compares models of any vocabulary. It is left out where the loss is no mean over target tokens.

    `note(kind, **values)` is called for each out of memory. Raises NothingFits if the smallest plan does not fit.
    """
    ranks, model, examples = evaluation.ranks, evaluation.model, evaluation.examples

    def sums_of(ids, plan):
        fault_injection.fire("evaluate", step)
        return metric_sums(model, examples, ids, plan.chunk_tokens)

    def cut_up(ids, plan):
        return cut(ids, examples.lengths(ids, EPOCH), plan.micro_batch_tokens)

    def shrink(plan):
        return shrink_plan(replace(plan, graphs=False), examples.histogram.longest)  # without backward none is captured

    share_ids = evaluation.share_ids
    note = partial(note, step=step, where="evaluate")
    now_doing("evaluating", total=len(share_ids))
    with evaluating(model):
        values = values_of_share(ranks, share_ids, plan, Parts(cut_up, sums_of, shrink), note)
    if values is None:
        return None
    names = examples.objective.metrics
    total = torch.stack([torch.zeros(2, len(names), dtype=torch.float64), *values]).sum(0)
    characters = torch.full((2, 1), evaluation.share_characters, dtype=torch.float64)
    sums, weights = sum_over_ranks(ranks, torch.cat([total, characters], 1).to(ranks.device)).cpu()
    means = means_by_name(names, (sums / weights).tolist()[: len(names)])
    return means | (dict(nats_per_char=(sums[0] / sums[-1]).item()) if sums[-1] else {})


def values_of_share(ranks, ids, plan, parts, note=lambda kind, **values: None):
    """List of the values of all parts of `ids`; None if any rank was asked to stop.

    After an out of memory on any rank, all ranks go on with the parts that are left: first with the same plan, then
    with smaller ones. Raises NothingFits if the smallest plan does not fit.
    """
    done, failed, before = [], 0, plan
    for tried in plans_to_try(plan, parts.shrink):
        if failed:
            note("oom", rank=failed - 1, before=asdict(before), after=asdict(tried))
        values, ids = _until_out_of_memory(ids, tried, parts)
        done += values
        failed, stop = vote(ranks, (ranks.rank + 1) * bool(len(ids)), stop_asked())
        if stop:
            return None
        if not failed:
            return done
        before = tried


def _until_out_of_memory(ids, plan, parts):
    """(values of the finished parts, ids of the rest, left because memory ran out or a stop was asked)."""
    values, left = [], list(parts.cut(ids, plan))
    while left and not stop_asked():
        fits, value = within_memory(parts.value, left[0], plan)
        if not fits:
            break
        values.append(value)
        advance(len(left.pop(0)))
    return values, np.concatenate(left) if left else ids[:0]


def generate_answers(evaluation, inputs, slots, most=None):
    """The ids of the answer to each of `inputs`, arrays of ids; so many `slots` are generated together.

    `most` tokens each, if given, but with the memory of whole answers.
    """
    new_tokens, first_id = evaluation.max_new_tokens, evaluation.examples.first_id
    longest = max(map(len, inputs))
    limits = Limits(min(slots, len(inputs)), longest, new_tokens, first_id, evaluation.tokenizer.eos_id)
    return generate(evaluation.model, inputs, limits, min(most or new_tokens, new_tokens), evaluation.sampling)


def question_rows(examples, count):
    """So many rows of the Examples, fewer if there are not: the first of one order in which questions are asked."""
    return permute(np.arange(min(count, len(examples))), len(examples), "answers")


def fields_of(evaluation, rows, inputs, references, answers):
    """For each of `rows`, the values of its Answer; the others are the ids of question, right answer and answer."""
    tokenizer = evaluation.tokenizer
    texts = shown_questions(tokenizer, inputs), tokenizer.decode_batch(answers), tokenizer.decode_batch(references)
    looped, reference_loops = ([repeats(ids, LOOP_TOKENS) for ids in batch] for batch in (answers, references))
    ended = [len(ids) < evaluation.max_new_tokens for ids in answers]
    return list(zip(map(int, rows), *texts, looped, ended, reference_loops, strict=True))


def answer_questions(evaluation, plan, step=0, note=lambda kind, **values: None):
    """List of Answer to a fixed choice of questions, in its order; None if a stop was asked.

    The questions are the same at every call, and every rank gets all answers. `plan.answers` are generated together.
    `note` is called for each out of memory. Raises NothingFits if an answer by itself does not fit.
    """
    ranks, examples = evaluation.ranks, evaluation.examples

    def answers_of(part, plan):
        fault_injection.fire("generate", step)
        inputs, references = examples.objective.questions(examples.store, part)
        return fields_of(evaluation, part, inputs, references, generate_answers(evaluation, inputs, plan.answers))

    def cut_up(ids, plan):
        size = ROUNDS_A_PART * plan.answers
        return [ids[start : start + size] for start in range(0, len(ids), size)]

    def shrink(plan):
        return replace(plan, answers=plan.answers // 2) if plan.answers > 1 else None

    chosen = question_rows(examples, evaluation.num_answers)
    places = {int(row): place for place, row in enumerate(chosen)}
    share_ids = chosen[ranks.rank :: ranks.world_size]
    share_ids = share_ids[np.argsort(examples.lengths(share_ids, EPOCH)[:, 0], kind="stable")]
    note = partial(note, step=step, where="generate")
    now_doing("answering", total=len(share_ids))
    answers = values_of_share(ranks, share_ids, plan, Parts(cut_up, answers_of, shrink), note)
    if answers is None:
        return None
    answered = [Answer(*fields) for rank in gather_json(ranks, answers) for part in rank for fields in part]
    return sorted(answered, key=lambda answer: places[answer.row])


def score(answers):
    """Dict of the answers' `measures`, and of BLEU-4 on characters and chrF, both 0 to 100 (sacrebleu)."""
    from sacrebleu.metrics import BLEU, CHRF  # imported here: the first step need not wait for it

    hypotheses, references = [a.answer for a in answers], [[a.reference for a in answers]]
    return measures(answers) | dict(
        bleu=BLEU(tokenize="char").corpus_score(hypotheses, references).score,
        chrf=CHRF().corpus_score(hypotheses, references).score,
    )


def samples_of(answers):
    """The first answers, the same questions at every evaluation, as plain values: question, answer and reference."""
    names = ("question", "answer", "reference")
    return [{name: _shortened(getattr(each, name)) for name in names} for each in answers[:NUM_SAMPLES]]


def _shortened(text):
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "…"


def measure(evaluation, plan, step=0, note=lambda kind, **values: None):
    """({name: number} of the model, list of Answer); None if a stop was asked.

    The numbers are the objective's metrics and nats_per_char, and, if answers are generated, what `score` says of them
    and answer_seconds. `note(kind, **values)` is called for each out of memory. Raises NothingFits if the smallest plan
    does not fit.
    """
    metrics = evaluate_loss(evaluation, plan, step, note)
    if metrics is None or not evaluation.num_answers:
        return metrics and (metrics, [])
    started = time.monotonic()
    answers = answer_questions(evaluation, plan, step, note)
    if answers is None:
        return None
    return metrics | score(answers) | dict(answer_seconds=time.monotonic() - started), answers
