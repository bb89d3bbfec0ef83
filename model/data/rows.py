"""The conversations and documents that the rows of a file say, whatever form they have."""

import re
from collections.abc import Callable, Iterable, Iterator

from model.data.columns import (
    CHOICE_COLUMNS,
    HISTORY_COLUMN,
    LABEL_COLUMNS,
    REJECTED_COLUMN,
    SYSTEM_COLUMNS,
    TOOL_COLUMNS,
    Columns,
    describe_missing,
    join_columns,
    layout_of,
)
from model.data.conversation import Conversation, Document, Turn
from model.data.file_request import FileRequest
from model.data.messages import BadTurn, exchange_turns, history_turns, is_false, is_turn, read_turn
from model.data.responses import messages_in, pair_of, rejected_turns
from model.data.tables import by_columns, rows_inside
from model.data.values import as_json, as_text, written
from model.runtime.json_stream import MAX_ITEM_CHARS, refuse

MAX_NESTING = 8
CHOSEN = "the number of one of its {!r}: write the question with these as the prompt and the right one as the response"
_MARKS = re.compile(r"(?:\s*<\|im_(?:start|end)\|>\s*)+")
Place = Callable[[], str]
Said = Conversation | Document


def conversations_of(items: Iterable, place: Place, request: FileRequest, depth: int = 0) -> Iterator[Said]:
    """Yield what the items of a list say; turns in a row, and texts that alternate, are one Conversation."""
    turns = Bare(place)
    for item in items:
        if isinstance(item, dict):
            if request.has_paths:
                item = _with_paths(item, request)
            names = tuple(item)
            if not request.has_rows:
                request.names = names
            layout = layout_of(names, request.prompt_column, request.response_of(names))
            plain = _plain_pair(item, layout, request) if layout.is_plain and not request.wants_rejected else None
            if plain is None and is_turn(item) and not (layout.prompts and layout.response):
                turns.add(item, request)
                continue
            yield from turns.taken()
            try:
                yield from (_of_row(item, layout, place, request, depth) if plain is None else (plain,))
            except BadTurn as error:
                request.on_malformed(f"{place()}: {error}")
        elif isinstance(item, str):
            turns.add(item, request)
        elif isinstance(item, list) and item:
            yield from turns.taken()
            yield from _of_list(item, place, request, depth)
        else:
            (refuse if turns.alternates else request.on_malformed)(f"{place()}: {_malformed(item)}")
    yield from turns.taken()


def _with_paths(row, request):
    """The row with the columns that the caller names as OBJECT.KEY."""
    for name in (request.prompt_column, request.response_column):
        column, _, key = name.partition(".")
        if name not in row and isinstance(row.get(column), dict) and key in row[column]:
            row = {**row, name: row[column][key]}
    return row


class Bare:
    """Turns that stand in a list of their own, without a row around them."""

    def __init__(self, place: Place):
        self.turns, self.num_chars, self.place, self.alternates = [], 0, place, False

    def add(self, item: dict | str, request: FileRequest) -> None:
        """Add a turn, or a text, whose role is the other one's; ValueError for a bad one or too long a talk."""
        if isinstance(item, str):
            self.alternates = True  # if one was left out, the later ones would change roles
            turn = Turn("assistant" if self.turns and self.turns[-1].role == "user" else "user", as_text(item))
        else:
            try:
                turn = read_turn(item, request.ignore)
            except BadTurn as error:
                raise ValueError(f"{self.place()}: {error}") from None
        if turn:
            self.turns.append(turn)
            self.num_chars += len(turn.text)
        if self.num_chars > MAX_ITEM_CHARS:
            raise ValueError(
                f"{self.place()}: a conversation of more than {MAX_ITEM_CHARS:,} characters; write one object per line"
            )

    def taken(self) -> Iterator[Conversation]:
        """The Conversation of the turns so far, if there are any; they are gone then."""
        if self.turns:
            turns, self.turns, self.num_chars = self.turns, [], 0
            yield Conversation(turns)


def _malformed(item):
    return f"a row is {str(item)[:40]}; it must be an object with a prompt and a response"


def _plain_pair(row: dict, layout: Columns, request: FileRequest) -> Conversation | None:
    """The Conversation of a row that is a prompt and a response, both plain values; else None."""
    response = row[layout.response]
    prompt, used = "", ()
    for pick in layout.prompts:
        if isinstance(row[pick[0]], list | dict):
            return None
        if prompt := join_columns(row, pick):
            used = pick
            break
    if isinstance(response, list | dict) or prompt[:2] == "[{":
        return None
    response = join_columns(row, (layout.response,))
    request.ignore_columns(row, (*used, layout.response))
    return Conversation((Turn("user", prompt), Turn("assistant", response)))


def _of_list(items: list, place: Place, request: FileRequest, depth: int) -> Iterator[Said]:
    """What a list in a list says: one conversation if it holds turns or texts, else one for each of its rows."""
    if depth >= MAX_NESTING:
        request.on_malformed(f"{place()}: lists nested more than {MAX_NESTING} deep; give a list of rows or dialogues")
    elif any(isinstance(item, str) or is_turn(item) for item in items):
        yield from _of_messages({}, "", items, place, request)
    else:
        yield from conversations_of(items, place, request, depth + 1)


def _of_row(row: dict, layout: Columns, place: Place, request: FileRequest, depth: int) -> Iterator[Said]:
    """What one object says."""
    if (name := next((name for name in CHOICE_COLUMNS if isinstance(row.get(name), list)), "")) and layout.response:
        if type(row[layout.response]) is int:
            request.leave_out(place(), f"{layout.response!r} is {row[layout.response]}, {CHOSEN.format(name)}")
            return
    has_pair = layout.response and (layout.prompts or messages_in(row[layout.response]))
    pair = pair_of(row, layout) if has_pair and by_columns(row) is None else None
    if pair and all(any(turn.text.strip() or turn.calls for turn in part) for part in pair[:2]):
        yield _from_pair(row, pair, layout, request)
        return
    for name in layout.messages:
        messages = written(row[name])
        if isinstance(messages, list) and messages and isinstance(messages[0], dict | list | str):
            if name == "data" and not any(is_turn(each) or isinstance(each, str) for each in messages):
                continue
            yield from _of_messages(row, name, messages, place, request)
            return
    if (inside := rows_inside(row, layout)) is not None:
        if depth >= MAX_NESTING:
            raise ValueError(f"{place()}: objects nested more than {MAX_NESTING} deep; give a list of rows")
        yield from conversations_of(inside, place, request, depth + 1)
    elif pair:
        yield _from_pair(row, pair, layout, request)
    elif "text" in row and isinstance(row["text"], str) and not request.prompt_column and not layout.response:
        request.ignore_columns(row, ("text",))
        yield Document(_without_marks(as_text(row["text"])))
    else:
        found = dict(prompt=layout.prompts, response=layout.response)
        given = dict(prompt=request.prompt_column, response=request.response_column)
        missing = {name: given[name] for name, columns in found.items() if not columns}
        problem, remedy = describe_missing(missing, row)
        request.leave_out(place(), problem, remedy + _hint(row))


def _hint(row):
    """What to type for a row whose texts are in an object, such as {"translation": {"en": …, "fr": …}}."""
    for name, value in row.items():
        if isinstance(value, dict) and len(texts := [key for key, text in value.items() if isinstance(text, str)]) > 1:
            first, second = (f"{name}.{key}" for key in texts[:2])
            return f"; texts in an object have names such as --prompt_column={first} --response_column={second}"
    return ""


def _without_marks(text):
    """The text without MiniMind's marks around each of its parts, which stand on lines of their own."""
    return _MARKS.sub("\n", text).strip() if text.startswith("<|im_start|>") else text


def _from_pair(row, pair, layout, request):
    prompt, response, used = pair
    history = history_turns(written(row[HISTORY_COLUMN])) if row.get(HISTORY_COLUMN) else None
    used += (HISTORY_COLUMN,) if history is not None else ()
    return _whole(row, [*(history or ()), *prompt], response, used, request)


def _of_messages(row: dict, name: str, messages: list, place: Place, request: FileRequest) -> Iterator[Conversation]:
    """The conversations of the messages in a column of a row; none if any of them is malformed."""
    ignored = []
    try:
        turns, tools = _turns_of(messages, lambda *counted: ignored.append(counted))
    except ValueError as error:
        request.on_malformed(f"{place()}: {error}")
        return
    for counted in ignored:
        request.ignore(*counted)
    if not turns:
        return
    used, begin = (name,) if name else (), len(turns)
    for column in ("chosen", "completion", "response"):
        if turns[-1].role == "user" and (response := messages_in(row.get(column))):
            turns += response
            used += (column,)
    begin = begin if begin < len(turns) else begin - 1
    beside = row if not tools else {**row, TOOL_COLUMNS[0]: tools}
    yield _whole(beside, turns[:begin], turns[begin:], used, request)


def _turns_of(items, ignore):
    """(turns of the items of a list of messages, the tools that one of them names); ValueError for a malformed one."""
    turns, tools = [], None
    for item in items:
        if is_turn(item):
            turn = read_turn(item, ignore)
            turns += [turn] if turn else []
            tools = item.get("tools") or tools
        elif isinstance(item, str):
            turns.append(Turn("assistant" if turns and turns[-1].role == "user" else "user", as_text(item)))
        elif isinstance(item, dict) and (more := exchange_turns(item, ignore)):
            turns += more
        elif isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item):
            turns += [Turn("user", as_text(item[0])), Turn("assistant", as_text(item[1]))]
        else:
            raise ValueError(_malformed(item))
    return turns, tools


def _whole(
    row: dict, prompt: list[Turn], response: list[Turn], used: tuple[str, ...], request: FileRequest
) -> Conversation:
    """The Conversation of a row's turns, with what other columns say of it.

    Where a rejected response is asked for and there, the prompt is context only.
    """
    rejected = ()
    if request.wants_rejected and row.get(REJECTED_COLUMN):
        used += (REJECTED_COLUMN,)
        rejected = rejected_turns(row[REJECTED_COLUMN], prompt)
        prompt = [turn._replace(learnt=False) for turn in prompt]
    turns = [*prompt, *response]
    for name in SYSTEM_COLUMNS:
        if isinstance(row.get(name), str) and row[name]:
            used += (name,)
            if row[name].strip():
                turns = [Turn("system", as_text(row[name])), *turns]
    tools = ""
    for name in TOOL_COLUMNS:
        if row.get(name):
            used, value = (*used, name), written(row[name])
            tools = as_json(value) if value else ""
    for name in LABEL_COLUMNS:
        label = row.get(name)
        if isinstance(label, bool) or isinstance(label, str) and label.lower() in ("true", "false"):
            used += (name,)
            if is_false(label):
                request.ignore("part", f"{name}=false: only good answers train")
                turns = [turn._replace(learnt=False) for turn in turns]
    request.ignore_columns(row, used)
    return Conversation(turns, tools, rejected)
