"""The turns in the columns of a row that hold a prompt or a response: a text, a message, a list of messages."""

from collections.abc import Sequence

from model.data.columns import REJECTED_COLUMN, Columns, join_columns
from model.data.conversation import Turn
from model.data.messages import is_turn, read_turn
from model.data.values import as_text, written


def pair_of(row: dict, layout: Columns) -> tuple[list[Turn], list[Turn], tuple[str, ...]]:
    """(turns of the prompt, turns of the response, columns that they were read from) of a row."""
    prompt, used = [Turn("user", "")], ()
    for pick in layout.prompts:
        messages = messages_in(row[pick[0]])
        if messages or (text := join_columns(row, pick)):
            prompt = [turn._replace(learnt=False) for turn in messages] or [Turn("user", text)]
            used = pick[:1] if messages else pick
            break
    messages = messages_in(row[layout.response])
    response = messages or [Turn("assistant", _response_text(row[layout.response]))]
    if response[0].role in ("user", "system"):  # the whole conversation
        begin = _num_shared(response, messages_in(row.get(REJECTED_COLUMN)))
        prompt, response = [turn._replace(learnt=False) for turn in response[:begin]], response[begin:]
    return prompt, response, (*used, layout.response)


def _num_shared(chosen, rejected):
    """How many turns of a conversation are its prompt: those of the rejected one too, or those before a response."""
    shared = next((place for place, both in enumerate(zip(chosen, rejected, strict=False)) if both[0] != both[1]), 0)
    return shared or next((place for place, turn in enumerate(chosen) if turn.role == "assistant"), len(chosen))


def _response_text(value: object) -> str:
    """The text of a response; SQuAD's answers give the first."""
    if isinstance(value, dict) and isinstance(value.get("text"), list) and "answer_start" in value:
        value = next(iter(value["text"]), "")
    elif isinstance(value, list) and value and all(isinstance(each, dict) and "answer_start" in each for each in value):
        value = value[0].get("text")
    text = as_text(value)
    return "" if text.isspace() else text


def messages_in(value: object) -> list[Turn]:
    """The turns of a value that is a message or a list of messages, or the JSON text of it; else []."""
    value = written(value)
    items = [value] if isinstance(value, dict) else value
    if not (isinstance(items, list) and items and all(map(is_turn, items))):
        return []
    return [turn for item in items if (turn := read_turn(item, lambda *counted: None))]


def rejected_turns(value: object, prompt: Sequence[Turn]) -> list[Turn]:
    """The turns of a rejected response, without those of the prompt where the value is the whole conversation."""
    turns = messages_in(value) or [Turn("assistant", _response_text(value))]
    if turns[0].role not in ("user", "system"):
        return turns
    asked = [turn for turn in prompt if turn.role != "system" or turns[0].role == "system"]
    same = (one[:2] == other[:2] for one, other in zip(turns, asked, strict=False))
    return turns[next((place for place, is_same in enumerate(same) if not is_same), min(len(turns), len(asked))) :]
