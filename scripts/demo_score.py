"""Score an exported model by exact match, in total and by kind of question, and show five answers."""

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.cgroup import limit_threads  # noqa: E402
from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
limit_threads()

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from model.commands.option_names import ScriptParser  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.serve.answering import answer_all, load_chat_model, prompt_ids  # noqa: E402

MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 512, 32
NUM_SHOWN = 5


def read_questions(path: Path) -> list[dict[str, str]]:
    """The rows of a parquet file. Raises ValueError if it is not one or lacks prompt, response or kind."""
    try:
        return pq.read_table(path, columns=["prompt", "response", "kind"]).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{path}: not a parquet file with prompt, response and kind; make one with scripts/demo_data.py: {error}"
        ) from error


def answer(model_dir: Path, questions: list[str]) -> list[str]:
    """The model's greedy answers, in the order of the questions. Raises ValueError if there is no model."""
    chat = load_chat_model(model_dir)
    inputs = [prompt_ids(chat, [("user", question)], MAX_PROMPT_TOKENS) for question in questions]
    return [text.strip() for text in answer_all(chat, inputs, chat.sampling, MAX_NEW_TOKENS)]


def exact_match_table(questions, answers, texts) -> tuple[float, str]:
    """(share of right answers from 0 to 1, table of right answers by kind, in the language of the Texts)."""
    by_kind = defaultdict(list)
    for question, text in zip(questions, answers, strict=True):
        by_kind[question["kind"]].append(text == question["response"])
    all_right = [is_right for rights in by_kind.values() for is_right in rights]
    rows = [*sorted(by_kind.items()), ("all", all_right)]
    lines = [
        texts("score.row", kind=kind, right=sum(right), count=len(right), share=sum(right) / len(right))
        for kind, right in rows
    ]
    return sum(all_right) / len(all_right), "\n".join(lines)


def main() -> int:
    parser = ScriptParser(description="Score an exported model by exact match.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("test_file", type=Path)
    parser.add_argument(
        "--minimum", type=float, default=0.0, help="exit with 1 below this share of right answers, 0 to 1"
    )
    options = parser.parse_args()
    try:
        questions = read_questions(options.test_file)
        answers = answer(options.model_dir, [question["prompt"] for question in questions])
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    texts = texts_here()
    share, table = exact_match_table(questions, answers, texts)
    print(table)
    for question, text in list(zip(questions, answers, strict=True))[:NUM_SHOWN]:
        verdict = "score.right" if text == question["response"] else "score.wrong"
        print(texts(verdict, question=question["prompt"], answer=text, response=question["response"]))
    return 0 if share >= options.minimum else 1


if __name__ == "__main__":
    sys.exit(main())
