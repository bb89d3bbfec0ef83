"""Makes preferences of a model: the right answers of a file as chosen ones, the model's own as rejected ones."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from model.data.conversation import Conversation
from model.data.readers import read_conversations
from model.generate.answer_quality import LOOP_TOKENS, repeats
from model.generate.engine import generate
from model.generate.sampling import Sampling
from model.runtime.atomic_io import end_of_last_line
from model.runtime.device_memory import within_memory
from model.serve.answering import ChatModel, prompt_ids

FIRST_ROWS, PART_SECONDS = 32, 20  # of the first part; a later one should take so long: what a stop loses
KEPT = "preferences"
REASONS = ("no_answer", "not_text", "too_long", "empty", "equal")  # why a row gives no preference


@dataclass(frozen=True)
class Asking:
    """How the model is asked."""

    sampling: Sampling
    samples: int  # answers to each question, of which the worst one is taken
    max_new_tokens: int
    max_prompt_tokens: int
    slots: int  # answers generated together


@dataclass(frozen=True)
class Own:
    """An answer of the model."""

    text: str
    loops: bool
    ended: bool  # by itself

    def badness(self, right: str) -> tuple:
        """Greater for a worse answer: one that loops, then one that does not end, then one of another length."""
        return self.loops, not self.ended, abs(math.log((len(self.text) + 1) / (len(right) + 1)))


def make_preferences(
    chat: ChatModel, conversations: Iterator[Conversation], asking: Asking, draft: Path, header: dict,
    progress: Callable[[int], None] = lambda done: None,
) -> None:  # fmt: skip
    """Write a line for each conversation to `draft`, behind those that an earlier call with this header wrote.

    `progress(rows)` is called after each part. Raises ValueError for a draft of another header.
    """
    done, count = _begin(draft, header), FIRST_ROWS
    conversations = islice(conversations, done, None)
    progress(done)
    while rows := list(islice(conversations, count)):
        started = time.monotonic()
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in answered(chat, rows, asking)]
        _append(draft, lines)
        done += len(rows)
        progress(done)
        count = max(int(count * min(PART_SECONDS / max(time.monotonic() - started, 1e-3), 2)), 1)


def _begin(draft, header):
    """Rows that are in the draft already; begins one where there is none."""
    first = json.dumps(header, ensure_ascii=False, sort_keys=True) + "\n"
    if draft.exists() and not draft.is_file():
        raise ValueError(f"{draft} is no file, and the answers are kept there until all are made: move it away")
    if draft.exists():
        with open(draft, "r+b") as file:
            file.truncate(end_of_last_line(file))
    if not draft.exists() or not draft.stat().st_size:  # the disk may have been full
        _append(draft, [first])
        return 0
    with open(draft, encoding="utf-8", errors="replace") as file:
        if next(file, "") != first:
            raise ValueError(
                f"{draft} was begun with another model, file or option: delete it, or type the same command as then"
            )
        return sum(1 for _ in file)


def _append(draft, lines):
    """Write lines to the end of the draft, to the disk; OSError says how to go on."""
    try:
        with open(draft, "a", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"{draft} cannot be written ({error.strerror}): solve that, and type the command again") from None


def answered(chat: ChatModel, conversations: list[Conversation], asking: Asking) -> list[dict]:
    """For each conversation a preference with what is told of it, or {"left_out": a reason}."""
    rows = [_question(chat, conversation, asking) for conversation in conversations]
    asked = [place for place, row in enumerate(rows) if "ids" in row]
    owns = _own_answers(chat, [rows[place].pop("ids") for place in asked], asking)
    for place, samples in zip(asked, owns, strict=True):
        rows[place] = _preference(chat, rows[place], samples)
    return rows


def _question(chat, conversation, asking):
    """The preference of a conversation without its rejected response, and the ids of its question."""
    turns = conversation.turns
    last = max((n for n, turn in enumerate(turns) if turn.role == "assistant" and turn.learnt), default=0)
    right, before = turns[last], turns[:last]
    if not last or not right.text.strip():
        return dict(left_out="no_answer")
    if right.calls or right.thought or conversation.tools or any(turn.calls for turn in before):
        return dict(left_out="not_text")
    try:
        ids = prompt_ids(chat, before, asking.max_prompt_tokens)
    except ValueError:
        return dict(left_out="too_long")
    prompt = before[0].text
    if len(before) > 1:
        prompt = [dict(role=turn.role, content=turn.text) for turn in before]
    return dict(prompt=prompt, chosen=right.text, ids=ids)


def _own_answers(chat, inputs, asking):
    """For each of `inputs` the model's answers to it, so many samples."""
    owns = [[] for _ in inputs]
    for number in range(asking.samples if inputs else 0):
        sampling = replace(asking.sampling, seed=asking.sampling.seed + number)
        answers = _generated(chat, inputs, sampling, asking)
        for own, ids, text in zip(owns, answers, chat.tokenizer.decode_batch(answers), strict=True):
            own.append(Own(text.strip(), repeats(ids, LOOP_TOKENS), len(ids) < asking.max_new_tokens))
    return owns


def _generated(chat, inputs, sampling, asking):
    """The ids of an answer to each of `inputs`; half as many together after an out of memory."""
    slots = min(asking.slots, len(inputs))
    while True:
        limits = chat.limits(slots, max(map(len, inputs)), asking.max_new_tokens)
        fits, answers = within_memory(generate, chat.model, inputs, limits, asking.max_new_tokens, sampling)
        if fits:
            return answers
        if slots == 1:
            raise RuntimeError("out of memory for an answer by itself: lower --max_prompt_tokens or --max_new_tokens")
        slots //= 2


def _preference(chat, row, samples):
    right = row["chosen"].strip()
    worst = max(samples, key=lambda own: own.badness(right))
    if not worst.text or worst.text == right:
        return dict(left_out="equal" if worst.text else "empty")
    told = dict(loops=worst.loops, ended=worst.ended, right_loops=repeats(chat.tokenizer.encode(right), LOOP_TOKENS))
    return row | dict(rejected=worst.text, told=told)


def finish(draft: Path, output: Path) -> Counter:
    """Write the preferences of a whole draft to `output`, delete the draft; returns what is counted of them.

    By name: KEPT, REASONS, and of the preferences `loops`, `ended`, `right_loops`, characters of `chosen`, `rejected`.
    """
    counts, written = Counter(), output.with_name(f".{output.name}.tmp")
    with open(draft, encoding="utf-8") as lines, open(written, "w", encoding="utf-8") as out:
        next(lines)
        for row in map(json.loads, lines):
            if reason := row.get("left_out"):
                counts[reason] += 1
                continue
            told = row.pop("told")
            counts.update({KEPT: 1} | {name: int(value) for name, value in told.items()})
            counts.update({name: len(row[name]) for name in ("chosen", "rejected")})
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(written, output)
    draft.unlink()
    return counts


def header_of(chat: ChatModel, file: Path, columns: tuple[str, str], asking: Asking) -> dict:
    """What decides the preferences: they go on only where it is the same."""
    files = [file, *sorted(chat.directory.glob("*.safetensors"))]
    stats = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    values = {name: getattr(asking, name) for name in ("samples", "max_new_tokens", "max_prompt_tokens")}
    return dict(files=stats, columns=list(columns), sampling=repr(asking.sampling), **values)


def conversations_in(file: Path, columns: tuple[str, str], rows: int, ignored: Counter) -> Iterator[Conversation]:
    """The first conversations of a file, so many of them, or all for 0."""
    return islice(read_conversations(file, *columns, ignored=ignored), rows or None)
