"""What an evaluation says of a model's answers, in words: figures and samples."""

from rich.cells import cell_len

from model.display.catalogue import Texts
from model.runtime.terminal import printable

# how each figure of an evaluation is written; the catalogue has its name
FORMATS = dict(
    loss="{:.4f}", nats_per_char="{:.4f}", loops="{:.1%}", loops_chars="{:.1%}", ended="{:.1%}",
    length_ratio="{:.2f}", distinct_2="{:.3f}", exact_match="{:.1%}", bleu="{:.2f}", chrf="{:.2f}", rouge_l="{:.3f}",
    accuracy="{:.1%}", margin="{:+.3f}", chosen_reward="{:+.3f}", rejected_reward="{:+.3f}",
    chosen_log_prob="{:.3f}", rejected_log_prob="{:.3f}", chosen_log_ratio="{:+.3f}", rejected_log_ratio="{:+.3f}",
)  # fmt: skip
ROWS = dict(answers=("loops", "ended", "length_ratio"), scores=("distinct_2", "bleu", "chrf"))
PREFERENCES = dict(
    preferences=("accuracy", "margin", "chosen_reward", "rejected_reward"),
    log_probs=("chosen_log_prob", "rejected_log_prob"),
)
QUESTION_COLUMNS, ANSWER_CHARACTERS = 120, 200  # of a sample in one line; most Chinese characters take two columns
QUESTION_SHARE = 3  # a question has at most a third of a line


def answer_rows(evaluation: dict, text: Texts) -> dict[str, str]:
    """The figures of the answers in an eval line of a journal, by row; rows of which it has none are left out."""
    rows = {row: figures_text(evaluation, names, text) for row, names in ROWS.items()}
    rows["nats"] = told(evaluation, "nats_per_char")
    return {row: said for row, said in rows.items() if said}


def preference_rows(line: dict, text: Texts) -> dict[str, str]:
    """What a train or eval line of a journal says of two responses, of which one is preferred, by row."""
    rows = {row: figures_text(line, names, text) for row, names in PREFERENCES.items()}
    return {row: said for row, said in rows.items() if said}


def figures_text(values: dict, names, text: Texts) -> str:
    """Name and value of each of the figures `names` that `values` has."""
    known = {name: said for name in names if (said := told(values, name))}
    return text("comma").join(f"{text(f'measure.{name}')} {said}" for name, said in known.items())


def told(values: dict, name: str) -> str:
    """The figure `name` as text; "" if `values` has none."""
    return "" if values.get(name) is None else FORMATS[name].format(values[name])


def sample_text(sample: dict, columns: int = QUESTION_SHARE * QUESTION_COLUMNS) -> str:
    """A question and its answer in a line of `columns`: of a long question the end, of a long answer the beginning."""
    question, answer = (" ".join(str(sample.get(name, "")).split()) for name in ("question", "answer"))
    asked = _end_of(question, columns // QUESTION_SHARE)
    said = answer if len(answer) <= ANSWER_CHARACTERS else answer[:ANSWER_CHARACTERS] + "…"
    return printable(f"{asked} → {said}")


def _end_of(words: str, columns: int) -> str:
    """`words`, or their end behind an ellipsis, in so many columns of a terminal."""
    if cell_len(words) <= columns:
        return words
    start = max(len(words) - columns, 0)
    while start < len(words) and cell_len(words[start:]) >= columns:
        start += 1
    return "…" + words[start:]
