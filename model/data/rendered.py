"""Conversations with thoughts, calls or tools in a chat template, which is rendered with their real texts."""

from bisect import bisect_left
from collections import Counter
from dataclasses import replace

from model.data.conversation import Turn, system_first
from model.data.encoded_dialogue import EncodedDialogue
from model.data.file_request import PART
from model.data.rendered_text import answer_spans, encode_rendered, is_inside
from model.data.template_frames import TemplateFrames

RENDERED_TOGETHER = 64  # conversations in a line to the template's process
REFUSED = "conversations that the template refuses"
Talk = tuple[list[Turn], str]  # turns, and the JSON text of the tools that may be called


def encode_talks(frames: TemplateFrames, talks: list[Talk], ignored: Counter) -> list[EncodedDialogue | None]:
    """The EncodedDialogue of each Talk; None for one that the template refuses, which is counted in `ignored`."""
    found = []
    for start in range(0, len(talks), RENDERED_TOGETHER):
        found += _encode_some(frames, talks[start : start + RENDERED_TOGETHER], ignored)
    return found


def _encode_some(frames, talks, ignored):
    """Each as it is or, where the template refuses that, with the system text first."""
    shown, encoded = _shown(frames, talks), [None] * len(talks)
    again = [place for place, (one, (turns, _)) in enumerate(zip(shown, talks, strict=True)) if _lacks(one, turns)]
    moved = [(system_first(talks[place][0]), talks[place][1]) for place in again]
    for place, one, talk in zip(again, _shown(frames, moved), moved, strict=True):
        shown[place], talks[place] = one, talk
    usable = []
    for place, one in enumerate(shown):
        spans = None if "error" in one else _learnt_spans(frames, one, talks[place][0])
        if spans is None:
            ignored[PART, REFUSED] += 1
        else:
            usable.append((place, spans))
    ids = _ids_of(frames, [shown[place] for place, _ in usable])
    for (place, spans), (row, starts) in zip(usable, ids, strict=True):
        one = EncodedDialogue.from_learnt(row, is_inside(starts, spans))
        encoded[place] = replace(one, systems_moved=1) if one and place in again else one
    return encoded


def _lacks(shown, turns):
    """Whether the template refuses the turns, or leaves out a system text amid them."""
    later = [turn.text.strip() for turn in turns[1:] if turn.role == "system"]
    return "error" in shown or not all(text in shown["text"] for text in later)


def _learnt_spans(frames, shown, turns):
    """The characters of each learnt answer; None where the template does not show each of them."""
    spans = shown["spans"]
    if spans is None:
        end = frames.tokenizer.backend.id_to_token(frames.end_id)
        spans = answer_spans(shown["text"], frames.can, end, frames.learn_empty_thoughts)
    answers = [turn for turn in turns if turn.role == "assistant"]
    if spans is None or len(spans) != len(answers):
        return None
    return [tuple(span) for span, turn in zip(spans, answers, strict=True) if turn.learnt]


def _shown(frames, talks, prompt=False, thinking=None):
    """What the template makes of each, with what the places in it stand for."""
    if not talks:
        return []
    drafts = [frames.guard.draft(turns, tools, prompt, thinking) for turns, tools in talks]
    shown = frames.render([one.request for one in drafts])
    return [one | dict(spelled=draft.spelled) for one, draft in zip(shown, drafts, strict=True)]


def _ids_of(frames, shown):
    return encode_rendered([one["text"] for one in shown], [one["spelled"] for one in shown], frames.tokenizer)


def rendered_question(
    frames: TemplateFrames, turns: list[Turn], max_tokens: int, tools: str, thinking: bool | None
) -> list[int]:
    """Ids that a network reads to answer the last of `turns`; as `TurnTemplate.encode_question`.

    Raises ValueError where the template refuses the conversation.
    """
    num_system = int(turns[0].role == "system")
    system, said = turns[:num_system], turns[num_system:]
    starts = [0, *(place for place, turn in enumerate(said) if place and turn.role == "user")]

    def asked(start):
        talk = [*system, *said[start:]]
        for turns in (talk, system_first(talk)):
            (shown,) = _shown(frames, [(turns, tools)], True, thinking)
            if "error" not in shown:
                return _ids_of(frames, [shown])[0][0]
        raise ValueError(f"{frames.name} cannot show this conversation: {shown['error']}")

    read = asked(0)
    if len(read) > max_tokens and len(starts) > 1:
        later = starts[1:]
        read = asked(later[bisect_left(later[:-1], True, key=lambda start: len(asked(start)) <= max_tokens)])
    while (
        len(read) > max_tokens and len(said[-1].text) > 1
    ):  # what stands behind the last text must stay: a part of it goes
        last = said[-1].text
        said[-1] = said[-1]._replace(text=last[: max(len(last) * max_tokens // len(read) - 1, 1)])
        read = asked(starts[-1])
    return read
