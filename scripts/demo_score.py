"""Score an exported model by exact match, in total and by kind of question, and show five answers."""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

BATCH_PROMPTS = 64
MAX_NEW_TOKENS = 32
NUM_SHOWN = 5


def read_questions(path: Path) -> list[dict[str, str]]:
    """The rows of a parquet file. Raises ValueError if it is not one or lacks prompt, response or kind."""
    try:
        return pq.read_table(path, columns=["prompt", "response", "kind"]).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{path}: not a parquet file with prompt, response and kind; make one with scripts/demo_data.py: {error}"
        ) from error


@torch.inference_mode()
def answer(model_dir: Path, prompts: list[str]) -> list[str]:
    """The model's greedy answers, in the order of the prompts. Raises ValueError if there is no config.json."""
    if not (model_dir / "config.json").is_file():  # transformers would take the path for the name of a remote model
        raise ValueError(f"{model_dir} has no config.json: name an exported model, for example .demo/run/best")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForSeq2SeqLM.from_pretrained(model_dir).to(device).eval()
    answers = []
    for start in range(0, len(prompts), BATCH_PROMPTS):
        batch = tokenizer(prompts[start : start + BATCH_PROMPTS], padding=True, return_tensors="pt").to(device)
        ids = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            num_beams=1,
        )
        answers.extend(text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True))
    return answers


def exact_match_table(questions: list[dict[str, str]], answers: list[str]) -> tuple[float, str]:
    """(share of right answers from 0 to 1, table of right answers by kind)."""
    by_kind = defaultdict(list)
    for question, text in zip(questions, answers, strict=True):
        by_kind[question["kind"]].append(text == question["response"])
    all_right = [is_right for rights in by_kind.values() for is_right in rights]
    rows = [*sorted(by_kind.items()), ("all", all_right)]
    lines = [f"{kind:<12} {sum(right):>5} of {len(right):>5} {sum(right) / len(right):>7.1%}" for kind, right in rows]
    return sum(all_right) / len(all_right), "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Score an exported model by exact match.")
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
    share, table = exact_match_table(questions, answers)
    print(table)
    for question, text in list(zip(questions, answers, strict=True))[:NUM_SHOWN]:
        verdict = "right" if text == question["response"] else f"wrong, it is {question['response']}"
        print(f"{question['prompt']}  →  {text}  ({verdict})")
    return 0 if share >= options.minimum else 1


if __name__ == "__main__":
    sys.exit(main())
