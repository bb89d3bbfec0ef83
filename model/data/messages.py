"""What one row says, as turns: messages in the forms of other trainers, exchanges, and a prompt with its response."""

from collections.abc import Callable

from model.data.columns import find_columns, join_columns
from model.data.conversation import TOOL, Turn
from model.data.values import as_text, written

USER_ROLES = frozenset({"user", "human", "prompter", "用户"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "助手"})
_ROLES = (
    ("system", ("system", "developer", "系统")),
    ("user", USER_ROLES),
    ("assistant", ASSISTANT_ROLES),
    (TOOL, (TOOL, "function", "observation", "ipython", "tool_response", "function_response", "tool_result")),
    ("call", ("function_call", "tool_call", "tool_calls", "function-call")),
)
ROLE_OF = {name: role for role, names in _ROLES for name in names}
ROLE_KEYS, TEXT_KEYS = ("role", "from"), ("content", "value")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
WEIGHT_KEYS = ("weight", "loss", "train_on_turn", "train")  # 0 and false: not learnt
NO, YES = ("false", "0", "0.0"), ("true", "1", "1.0")  # weights as texts
CALL_KEYS = ("tool_calls", "function_call")
SILENT_KEYS = ("tool_call_id", "name", "id", "type", "tools")  # of a turn: they say nothing that is learnt


class BadTurn(ValueError):
    """A turn says what cannot be done."""


def is_turn(item: object) -> bool:
    """Whether an item is a turn of a dialogue: an object with a role and a text, or calls."""
    if not isinstance(item, dict):
        return False
    has_role = isinstance(item.get("role"), str) or isinstance(item.get("from"), str)
    return has_role and any(key in item for key in (*TEXT_KEYS, *CALL_KEYS, *THOUGHT_KEYS))


def read_turn(item: dict, ignore: Callable) -> Turn | None:
    """The Turn of an item that is one; None for one of an unknown role, which `ignore(kind, name)` counts.

    Raises BadTurn for an answer whose weight is neither 0 nor 1.
    """
    role = item["role"] if isinstance(item.get("role"), str) else item["from"]
    content = item["content"] if "content" in item else item.get("value")
    ours = ROLE_OF.get(role) or ROLE_OF.get(role.strip().lower())
    if ours is None:
        ignore("turns", role.strip().lower())
        return None
    if ours == "call":
        return Turn("assistant", "", calls=calls_of(written(content)))
    text = _message_text(content, ignore)
    if len(item) == 2:
        return Turn(ours, text)
    return _full_turn(item, ours, text, ignore)


def _full_turn(item, role, text, ignore):
    thought = next((as_text(item[key]) for key in THOUGHT_KEYS if item.get(key)), "")
    calls = next((calls_of(written(item[key])) for key in CALL_KEYS if item.get(key)), ())
    for name, value in item.items():
        is_known = name in ROLE_KEYS + TEXT_KEYS + THOUGHT_KEYS + WEIGHT_KEYS + CALL_KEYS + SILENT_KEYS
        if not is_known and value not in (None, "", [], {}):
            ignore("column", name)
    is_learnt = _is_learnt(item, role)
    if role == "assistant" and not is_learnt:
        ignore("part", "answers of weight 0")
    return Turn(role, text, thought, calls, is_learnt)


def _is_learnt(item, role):
    # NaN, which differs from itself, is what tables have where nothing was written
    weights = {key: x for key in WEIGHT_KEYS if (x := item.get(key)) not in (None, "") and x == x}
    for key, value in weights.items():
        if role == "assistant" and not is_false(value) and value != 1 and str(value).strip().lower() not in YES:
            raise BadTurn(
                f"{key}={value!r:.40}: an answer is learnt (1) or not (0): write one of them, or leave it out"
            )
    return not any(map(is_false, weights.values()))


def is_false(value: object) -> bool:
    """Whether a weight or label says no: 0, false, or such a text."""
    return value == 0 or isinstance(value, str) and value.strip().lower() in NO


def _message_text(content, ignore):
    """The text of a message's content; parts that are no text are counted."""
    if isinstance(content, str):
        return as_text(content)
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        content = [content]
    if isinstance(content, list) and any(isinstance(part, dict) for part in content):
        texts = []
        for part in content:
            text = part.get("text", part.get("value")) if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
            elif part is not None:
                ignore("part", f"{part.get('type', 'other') if isinstance(part, dict) else 'other'} parts")
        return as_text(texts)
    return as_text(content)


def calls_of(value: object) -> tuple[str, ...]:
    """The JSON text of {"name", "arguments"} of each call, in whatever form a trainer writes calls."""
    calls = value if isinstance(value, list) else [value]
    return tuple(_call_text(written(call)) for call in calls if call not in (None, "", {}))


def _call_text(call):
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if isinstance(call, dict) and "name" in call:
        call = dict(name=call["name"], arguments=written(call.get("arguments", call.get("parameters", {}))))
    return as_text(call)


def exchange_turns(row: dict, ignore: Callable) -> list[Turn]:
    """The turns of a round in one object, {human, assistant} or {input, output, system}; [] for another."""
    prompts, response = find_columns(tuple(row))
    if not (prompts and response):
        return []
    system = [Turn("system", as_text(row["system"]))] if row.get("system") else []
    used, prompt = next(((pick, text) for pick in prompts if (text := join_columns(row, pick))), ((), ""))
    for name, value in row.items():
        if name not in (*used, *response, "system") and value not in (None, "", [], {}):
            ignore("column", name)
    return [*system, Turn("user", prompt), Turn("assistant", as_text(row[response[0]]))]


def history_turns(value: object) -> list[Turn] | None:
    """What was said before, from [[question, answer], …] or messages; None for another form.

    Its answers are context: they are learnt where they are answers themselves.
    """
    if not isinstance(value, list):
        return None
    turns = []
    for item in value:
        if is_turn(item):
            turn = read_turn(item, lambda *counted: None)
            turns += [turn._replace(learnt=False)] if turn else []
        elif isinstance(item, list) and len(item) == 2 and all(text is None or isinstance(text, str) for text in item):
            question, answer = map(as_text, item)
            if answer.strip():  # a question that has none is forgotten, and an answer may stand alone
                turns += [Turn("user", question)] if question.strip() else []
                turns.append(Turn("assistant", answer, learnt=False))
        else:
            return None
    return turns
