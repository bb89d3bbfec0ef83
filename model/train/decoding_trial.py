"""Measures a model's answers to validation questions with several ways of choosing tokens, within a time."""

import time
from dataclasses import replace
from functools import partial

import numpy as np

from model.generate.answer_quality import LOOP_CHARACTERS, LOOP_TOKENS, Answer, measures, repeats
from model.generate.decoding_choice import References, Tried
from model.generate.engine import Limits, Request, answer_requests
from model.runtime import fault_injection
from model.runtime.activity import advance, now_doing
from model.runtime.device_memory import release_memory, within_memory
from model.runtime.watchdog import stop_asked
from model.train.evaluate import fields_of, question_rows

ROUND, ROUNDS = 64, 2  # questions that are asked together; how often that is done, if the time allows


def try_ways(evaluation, groups, slots, seconds, step=0):
    """(a Tried for each way that was tried, the References, the number of questions); None if none could be tried.

    Each of the `groups`, lists of Samplings, is asked a round of questions, then all are asked more, as far as so many
    `seconds` allow. At most `slots` answers are generated together, fewer if the memory does not allow so
    many. It needs no other rank. None if memory or time ran out in the first round, or a stop was asked. `step` is the
    weights', for injected faults.
    """
    rows, until = question_rows(evaluation.examples, ROUND * ROUNDS), time.monotonic() + seconds
    every = [way for group in groups for way in group]
    first, *others = np.split(rows, range(ROUND, len(rows), ROUND))
    asked, answers, pace = first, {}, 0.0  # seconds of an answer, as the last ones took
    now_doing("answering", total=len(rows) * len(every))
    for ways, part in [*((group, first) for group in groups), *((every, part) for part in others)]:
        started = time.monotonic()
        if started + pace * len(ways) * len(part) > until:
            break
        more, slots = _answer_in_memory(partial(_answer, evaluation, ways, part, step), slots, until)
        if more is None:
            break
        pace = (time.monotonic() - started) / (len(ways) * len(part))
        answers |= {way: answers.get(way, []) + of_way for way, of_way in zip(ways, more, strict=True)}
        asked = asked if part is first else np.concatenate([asked, part])
        advance(len(part) * len(ways))
    if not answers or stop_asked():
        return None
    return [_measured(*each) for each in answers.items()], _references(evaluation, asked), len(asked)


def _answer_in_memory(answer, slots, until):
    """(what `answer(slots, until)` gives, or None if it could not be had, slots that memory allows)."""
    while slots:
        fits, answers = within_memory(answer, slots, until)
        if fits:
            return answers, slots
        release_memory()
        slots //= 2
    return None, slots


def _answer(evaluation, ways, rows, step, slots, until):
    """For each of `ways` the Answers to `rows`; None if a stop was asked or it is later than `until`."""
    fault_injection.fire("decoding", step)
    examples, most = evaluation.examples, evaluation.max_new_tokens

    def is_over():
        return stop_asked() or time.monotonic() > until

    inputs, references = examples.objective.questions(examples.store, rows)
    requests = [
        Request(ids, most, replace(way, seed=place)) for way in ways for place, ids in enumerate(inputs)
    ]  # each question has a seed of its own: equal ones would draw alike
    limits = Limits(
        min(slots, len(requests)), max(map(len, inputs)), most, examples.first_id, evaluation.tokenizer.eos_id
    )
    ids = answer_requests(evaluation.model, requests, limits, is_over)
    if is_over():
        return None
    parts = (ids[start : start + len(rows)] for start in range(0, len(ids), len(rows)))
    return [[Answer(*each) for each in fields_of(evaluation, rows, inputs, references, part)] for part in parts]


def _measured(way, answers):
    from sacrebleu.metrics import CHRF  # imported here: the first step need not wait for it

    figures = measures(answers)
    chrf = CHRF().corpus_score([a.answer for a in answers], [[a.reference for a in answers]]).score
    loops = max(figures["loops"], figures["loops_chars"])
    return Tried(way, loops, figures["ended"], figures["exact_match"], chrf)


def _references(evaluation, rows):
    """The References of these rows; a text that loops by tokens or by characters loops."""
    examples = evaluation.examples
    _, references = examples.objective.questions(examples.store, rows)
    lengths = np.array([len(ids) for ids in references])  # the token that ends them included
    by_tokens = [repeats(list(ids), LOOP_TOKENS) for ids in references]
    by_characters = [repeats(text, LOOP_CHARACTERS) for text in evaluation.tokenizer.decode_batch(references)]
    return References(
        float(np.median(lengths)),
        max(np.mean(by_tokens), np.mean(by_characters)),
        float(np.mean(lengths <= evaluation.max_new_tokens)),
    )  # fmt: skip
