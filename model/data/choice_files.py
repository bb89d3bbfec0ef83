"""Questions with four choices, as C-Eval, CMMLU and MMLU publish them: a csv file for each subject.

C-Eval's files have the columns id,question,A,B,C,D,answer (and explanation in dev/), CMMLU's
,Question,A,B,C,D,Answer, and MMLU's have six columns without a header. The examples that are shown before a question
are those of the subject's dev file.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from model.data.choice_subjects import CHINESE_NAMES

LETTERS = "ABCD"
ENDINGS = ("_val", "_dev", "_test")  # of a file's name, behind the subject's


@dataclass(frozen=True)
class Style:
    """How a benchmark's publication asks: a head with the subject's name, the question, its choices, and their end."""

    name: str
    head: str
    before: str  # the question
    after: str  # the choices, each on a line of its own
    space: str  # between that and the answer's letter

    def block(self, question):
        """The text of a question without its answer."""
        choices = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, question.choices, strict=True))
        return f"{self.before}{question.text}{choices}\n{self.after}"

    def shot(self, question):
        """The text of an example with its answer."""
        return f"{self.block(question)}{self.space}{LETTERS[question.answer]}\n\n"


CEVAL = Style("C-Eval", "以下是中国关于{}考试的单项选择题，请选出其中的正确答案。\n\n", "", "答案：", "")
CMMLU = Style("CMMLU", "以下是关于{}的单项选择题，请直接给出正确答案的选项。\n\n", "题目：", "答案是：", "")
MMLU = Style("MMLU", "The following are multiple choice questions (with answers) about {}.\n\n", "", "Answer:", " ")


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]  # one for each of LETTERS
    answer: int  # place of the right one


@dataclass(frozen=True)
class Subject:
    """The questions of a file, and the examples that may be shown before them."""

    name: str
    style: Style
    questions: tuple[Question, ...]
    shots: tuple[Question, ...] = ()

    def prompt(self, question, num_shots):
        """The text that the letter of the right answer follows."""
        shots = "".join(map(self.style.shot, self.shots[:num_shots]))
        return f"{self._head}{shots}{self.style.block(question)}"

    @property
    def _head(self):
        spaced = self.name.replace("_", " ")
        return self.style.head.format(spaced if self.style is MMLU else CHINESE_NAMES.get(self.name, spaced))


def read_subjects(path, num_shots=0) -> list[Subject]:
    """The Subjects of a csv file or of those in a folder, each with its first `num_shots` examples.

    Raises ValueError if there are none, for rows that are no questions with an answer, and for too few examples.
    """
    return [_subject(file, num_shots) for file in _files(Path(path))]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--choices_file={path}: no such file or folder; name a csv file, or a folder of them")
    files = sorted(file for file in path.glob("*.csv") if file.is_file())
    asked = [file for file in files if not file.stem.endswith("_dev")] or files  # some have all in one folder
    if not asked:
        inside = ", ".join(sorted({str(file.parent) for file in path.glob("*/*.csv")}))
        hint = f": name one of its folders, {inside}" if inside else ": name the folder that has them"
        raise ValueError(f"--choices_file={path} has no csv files{hint}")
    return asked


def _subject(file: Path, num_shots: int) -> Subject:
    name = next((file.stem.removesuffix(end) for end in ENDINGS if file.stem.endswith(end)), file.stem)
    style, questions = _read(file)
    if not num_shots:
        return Subject(name, style, questions)
    folder = file.absolute().parent.parent
    places = file.with_name(f"{name}_dev.csv"), *(folder / "dev" / f"{name}{end}.csv" for end in ("_dev", ""))
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(
            f"--num_shots={num_shots}: there is no dev file with the examples of {file}; searched "
            f"{', '.join(map(str, places))}: put it there, or type --num_shots=0"
        )
    shots = _read(found)[1]
    if len(shots) < num_shots:
        raise ValueError(f"--num_shots={num_shots}: {found} has {len(shots)} examples: type --num_shots={len(shots)}")
    return Subject(name, style, questions, shots[:num_shots])


def _read(file: Path) -> tuple[Style, tuple[Question, ...]]:
    """The Style and the questions of a csv file."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text)
            rows = [(reader.line_num, row) for row in reader if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no csv file in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{file} has no rows")
    style, columns, has_header = _layout(file, rows[0][1])
    questions = tuple(_question(file, line, row, columns) for line, row in rows[has_header:])
    if not questions:
        raise ValueError(f"{file} has a header and no questions")
    return style, questions


def _layout(file: Path, first: list[str]) -> tuple[Style, list[int], bool]:
    """(Style, places of question, choices and answer in a row, whether the first row is a header)."""
    names = [name.strip() for name in first]
    lowered = [name.lower() for name in names]
    wanted = ["question", *map(str.lower, LETTERS), "answer"]
    if "question" in lowered and lowered[lowered.index("question") :][1:5] == wanted[1:5]:
        if "answer" not in lowered:
            raise ValueError(f"{file} has no column answer: C-Eval's test files have none, so name the folder val")
        return CMMLU if "Question" in names else CEVAL, [lowered.index(name) for name in wanted], True
    if len(first) == len(wanted) and first[-1].strip() in tuple(LETTERS):
        return MMLU, list(range(len(wanted))), False
    raise ValueError(
        f"{file}: its first row is {', '.join(names)!r:.200}; known are C-Eval's id,question,A,B,C,D,answer, CMMLU's "
        ",Question,A,B,C,D,Answer, and MMLU's six columns without a header, of which the last is the answer's letter"
    )


def _question(file: Path, line: int, row: list[str], columns: Iterable[int]) -> Question:
    if len(row) <= max(columns):
        raise ValueError(f"{file}, line {line}: a row of {len(row)} columns, and {max(columns) + 1} are needed")
    text, *choices, answer = (row[place].strip() for place in columns)
    if answer not in tuple(LETTERS):
        raise ValueError(f"{file}, line {line}: the answer is {answer!r:.80}: it must be one of {', '.join(LETTERS)}")
    return Question(text, tuple(choices), LETTERS.index(answer))
