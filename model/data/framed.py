"""Plain dialogues in a template's frames: the ids of all texts are computed together, and the template sees none."""

from bisect import bisect_left
from dataclasses import replace
from itertools import chain, pairwise

from model.data.conversation import Turn, encode_newest
from model.data.encoded_dialogue import EncodedDialogue
from model.data.template_frames import TemplateFrames
from model.data.thought_frame import frame_roles


def encode_framed(frames: TemplateFrames, dialogues: list[list[Turn]]) -> list[EncodedDialogue]:
    """The EncodedDialogue of each of `dialogues`, which have a learnt answer."""
    placed = [frames.placed(turns) for turns in dialogues]
    around, shown = frames.thought_frame, [frames.without_hidden_thoughts(turns) for turns in placed]
    texts = [text for turns in shown for turn in turns for text in around.texts(turn)]
    ids = iter(frames.tokenizer.encode_batch(texts))
    encoded = [
        _joined(frames, turns, [around.ids(turn, ids) for turn in seen])
        for turns, seen in zip(placed, shown, strict=True)
    ]
    moved = [_has_moved(turns, now) for turns, now in zip(dialogues, placed, strict=True)]
    return [replace(one, systems_moved=1) if has else one for one, has in zip(encoded, moved, strict=True)]


def _joined(frames, turns, ids):
    answers = [place for place, turn in enumerate(turns) if turn.role == "assistant" and turn.learnt]
    first, last = answers[0], answers[-1]
    frame, end = frames.frame(frame_roles(turns)), frames.end_id
    rest, lengths = [], []
    for place, following in pairwise(answers):
        behind = _woven(frame[place + 1 : following + 1], ids[place + 1 : following])
        has_end = behind[:1] == [end]
        parts = [*ids[place], *behind[:has_end]], behind[has_end:]
        rest += chain(*parts)
        lengths += map(len, parts)
    question = _woven(frame[: first + 1], ids[:first])
    return EncodedDialogue(question, [*rest, *ids[last], end], [*lengths, len(ids[last]) + 1])


def _has_moved(before, now):
    """Whether a system text stands elsewhere now."""
    roles = [turn.role for turn in before]
    return "system" in roles[1:] and [turn.role for turn in now] != roles and now[0].role == "system"


def framed_question(frames: TemplateFrames, turns: list[Turn], max_tokens: int) -> list[int]:
    """Ids that a network reads to answer the last of `turns`; as `TurnTemplate.encode_question`, of plain turns."""
    turns = frames.placed(turns)
    num_system = int(turns[0].role == "system")
    system, said = turns[:num_system], turns[num_system:]
    system_ids = _encode(frames, system)
    ids = encode_newest(said, lambda newest: _encode(frames, newest), max_tokens)
    said = said[len(said) - len(ids) :]
    is_whole = len(system) + len(said) == len(turns)
    starts = [place for place, turn in enumerate(said) if turn.role == "user" or place == 0 and is_whole]

    def asked(start):
        roles = (*(turn.role for turn in [*system, *said[start:]]), "assistant")
        return _woven(frames.frame(roles)[:-1], [*system_ids, *ids[start:]])

    read = asked(starts[0])
    if len(read) > max_tokens:
        later = starts[1:] or starts
        read = asked(later[bisect_left(later[:-1], True, key=lambda start: len(asked(start)) <= max_tokens)])
    if (excess := len(read) - max_tokens) > 0:
        ids[-1] = ids[-1][: max(len(ids[-1]) - excess, 1)]
        read = asked(starts[-1])
    return read


def _encode(frames, turns):
    return frames.tokenizer.encode_batch([turn.text for turn in turns])


def _woven(frame, ids):
    """The first list of `frame`, the first of `ids`, the second of `frame` …; `frame` has one more."""
    return [*chain.from_iterable(chain(*zip(frame, ids, strict=False))), *frame[-1]]
