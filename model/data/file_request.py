"""What a caller asks of a file, and what is counted of it that is not used."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from model.data.columns import CHOSEN_COLUMN
from model.runtime.json_stream import OnMalformed, refuse

# Kinds of content that are read but not used.
TURNS, COLUMN, PART, ROWS, CONTEXT = "turns", "column", "part", "rows", "context"
READ_AS = "read_as"  # an encoding that was assumed
CHARS, ALL_CHARS = "chars", "all chars"  # of a column that is not used, and of all columns in its rows
IGNORED_WORDS = {
    "unused": "not used", READ_AS: "read as", TURNS: "turns of role", COLUMN: "column", PART: "in conversations",
    ROWS: "in the file", CONTEXT: "earlier turns", "others": "others", "share": "of their characters",
    "unit.turns": "turns", "unit.column": "rows", "unit.part": "times", "unit.rows": "rows",
    "unit.context": "pairs of longer dialogues",
}  # fmt: skip
MAX_NAMED, MAX_NAME_CHARS = 20, 40
MAX_ROWS_WITHOUT = 1000  # rows without the columns, before the first that has them


@dataclass
class FileRequest:
    """The caller's options for one file; `ignored` counts by (kind, name) the content that is not used."""

    prompt_column: str = ""
    response_column: str = ""
    on_malformed: OnMalformed = refuse
    ignored: Counter = field(default_factory=Counter)
    encoding: str = ""  # of a text file; found when not given
    wants_rejected: bool = False  # rejected responses are read, too
    has_paths: bool = False  # a column is named as OBJECT.KEY
    has_rows: bool = False  # a row with the columns was found
    names: tuple[str, ...] = ()  # the columns of that row
    hint: str = ""  # to a file of this kind without the columns
    num_without: int = 0
    without: str = ""  # what the first row without the columns lacks

    def __post_init__(self):
        self.has_paths = "." in self.prompt_column + self.response_column

    def response_of(self, names: tuple[str, ...]) -> str:
        """The column of the response among these names, if the caller names it; "": found by name."""
        return self.response_column or (CHOSEN_COLUMN if self.wants_rejected and CHOSEN_COLUMN in names else "")

    def ignore(self, kind: str, name: str, count: int = 1) -> str:
        """Add to the count of (kind, name), or of (kind, "") if MAX_NAMED names are counted; returns the name or ""."""
        key = kind, name[:MAX_NAME_CHARS]
        if key not in self.ignored and sum(each not in (CHARS, ALL_CHARS) for each, _ in self.ignored) >= MAX_NAMED:
            key = kind, ""
        self.ignored[key] += count
        return key[1]

    def ignore_columns(self, row: dict, used: tuple[str, ...]) -> None:
        """Count the columns of the row that have a value and are not in `used`, and their characters."""
        if len(row) > len(used):
            num_chars = 0
            for name, value in row.items():
                if name not in used and value is not None and value not in ("", [], {}):
                    num_chars = num_chars or _num_chars(row)
                    shown = self.ignore(COLUMN, name)
                    self.ignored[CHARS, shown] += _num_chars(value)
                    self.ignored[ALL_CHARS, shown] += num_chars

    def leave_out(self, place: str, problem: str, remedy: str = "") -> None:
        """Count a row without the columns; raises ValueError where a file begins with MAX_ROWS_WITHOUT such rows."""
        self.num_without += 1
        self.without = self.without or problem + remedy + self.hint
        if not self.has_rows:
            if self.num_without == MAX_ROWS_WITHOUT:
                raise ValueError(f"{place}: {self.without}")
        if self.on_malformed is not refuse:
            self.on_malformed(f"{place}: {problem}")
        else:
            self.ignore(ROWS, "rows without a prompt and a response")


def _num_chars(value):
    """The characters of all texts in a value, and one for each other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 1


def describe_ignored(ignored: Counter, word: Callable[[str], str] = IGNORED_WORDS.__getitem__) -> str:
    """The counts and assumptions in `ignored`, as one phrase for a message; "" if there are none.

    `word` gives one of IGNORED_WORDS in another language.
    """
    names_by_kind = {kind: [] for kind in (TURNS, COLUMN, PART, ROWS, CONTEXT)}
    assumed = [f"{word(READ_AS)} {name}" for kind, name in ignored if kind == READ_AS]
    for (kind, name), count in ignored.most_common():
        if kind in (READ_AS, CHARS, ALL_CHARS):
            continue
        unit = word(f"unit.{kind}") if count > 1 else word(f"unit.{kind}").replace("s", "", 1)
        named = "" if kind == CONTEXT else f"{repr(name) if name else word('others')} "
        if kind in (PART, ROWS):
            named = f"{name or word('others')} "
        if kind == COLUMN and (total := ignored[ALL_CHARS, name]):
            unit += f", {ignored[CHARS, name] / total:.0%} {word('share')}"
        names_by_kind[kind].append(f"{named}({count:,} {unit})")
    lines = [f"{word(kind)} {', '.join(names)}".strip() for kind, names in names_by_kind.items() if names]
    return "; ".join([*assumed, *([f"{word('unused')}: {'; '.join(lines)}"] if lines else [])])
