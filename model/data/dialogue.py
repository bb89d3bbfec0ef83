"""What a dialogue has said so far, while a reader goes through its turns or rows."""

from collections.abc import Callable

from model.data.columns import as_text
from model.data.conversation import Context, Turn, add_turn
from model.runtime.json_stream import MAX_ITEM_CHARS

USER_ROLES = frozenset({"user", "human", "prompter", "用户"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "助手"})
SYSTEM_ROLES = frozenset({"system", "developer", "系统"})
DIALOGUE_COLUMNS = frozenset({"conversation", "conversations", "messages", "dialogue", "dialog", "turns", "data"})
TALK_COLUMNS = DIALOGUE_COLUMNS - {"data"}  # their rows follow from one another
SYSTEM_COLUMN, HISTORY_COLUMN = "system", "history"
CONTEXT_COLUMNS = frozenset({SYSTEM_COLUMN, HISTORY_COLUMN})
MAX_KEPT_CHARS = 1 << 20  # of the turns that a dialogue remembers; the longest context has 65,535 tokens


class Dialogue:
    """The turns so far; each context that it gives is a view of their one list."""

    def __init__(self, system: str = ""):
        self.system, self.turns, self.num_chars = system, [], 0

    def context(self) -> Context | None:
        """What was said before the next question; None if nothing was."""
        if not (self.turns or self.system.strip()):
            return None
        return Context(self.turns, len(self.turns), self.system if self.system.strip() else "")

    def add_system(self, text: str) -> None:
        """Add to the system text, on a line of its own."""
        if text.strip():
            self.system = f"{self.system}\n{text}" if self.system.strip() else text

    def next_context(self, question: str, answer: str) -> Context | None:
        """The context of this question, which becomes a part of the next one's, with its answer."""
        context = self.context()
        self.add_exchange(question, answer)
        return context

    def add_exchange(self, question: str, answer: str) -> None:
        """Remember a question with its answer; a question that has none is forgotten, and an answer may stand alone."""
        if not answer.strip():
            return
        add_turn(self.turns, "user", question)
        add_turn(self.turns, "assistant", answer)
        self.num_chars += len(question) + len(answer)
        if self.num_chars > MAX_KEPT_CHARS:
            self.turns = newest_turns(self.turns, len(self.turns), MAX_KEPT_CHARS // 2)
            self.num_chars = sum(len(turn.text) for turn in self.turns)


def join_turns(question: str | None, text: str, place: Callable[[], str]) -> str:
    """A question, if there is one, and the user's next turn, on lines of their own; ValueError if they are too long."""
    question = text if question is None else question + "\n" + text
    if len(question) > MAX_ITEM_CHARS:
        raise ValueError(
            f"{place()}: a user's turns of more than {MAX_ITEM_CHARS:,} characters without an answer between"
        )
    return question


def newest_turns(turns: list[Turn], end: int, max_chars: int) -> list[Turn]:
    """The newest of the first `end` turns that have at most `max_chars` characters together."""
    start = end
    while start and (max_chars := max_chars - len(turns[start - 1].text)) >= 0:
        start -= 1
    return turns[start:end]


def context_beside(row: dict) -> tuple[Context | None, tuple[str, ...]]:
    """(Context of a pair from the columns `system` and `history` of its row, the columns that were used)."""
    system, history = row.get(SYSTEM_COLUMN), row.get(HISTORY_COLUMN)
    dialogue, used = Dialogue(), []
    if isinstance(system, str):
        dialogue.add_system(as_text(system))
        used.append(SYSTEM_COLUMN)
    if _is_history(history):
        for exchange in history:
            dialogue.add_exchange(*map(as_text, exchange))
        used.append(HISTORY_COLUMN)
    return dialogue.context(), tuple(used)


def _is_history(value: object) -> bool:
    """Whether the value is a list of [question, answer]; either may be null."""
    return isinstance(value, list) and all(
        isinstance(exchange, list)
        and len(exchange) == 2
        and all(text is None or isinstance(text, str) for text in exchange)
        for exchange in value
    )


def find_turns(item: object) -> tuple[str, list | None]:
    """(column, its list of turns or rows) of a row; ("", item) if the item itself is a list, else ("", None)."""
    if isinstance(item, list):
        return "", item
    for name, value in item.items() if isinstance(item, dict) else ():
        if isinstance(value, list) and name in DIALOGUE_COLUMNS and isinstance((value or [0])[0], dict | list | str):
            return name, value
    return "", None


def read_turn(item: object, is_answer: bool) -> tuple[str, str, tuple[str, ...]]:
    """(role in lower case, text, columns that were read) of a turn, all empty if the item is none.

    `is_answer` gives the role of a text without one.
    """
    if isinstance(item, str):
        return ("assistant" if is_answer else "user"), as_text(item), ()
    for role, text in (("role", "content"), ("from", "value")) if isinstance(item, dict) else ():
        if isinstance(item.get(role), str) and text in item:
            return item[role].strip().lower(), as_text(item[text]), (role, text)
    return "", "", ()
