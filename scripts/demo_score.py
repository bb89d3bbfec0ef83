"""Marks an exported model by exact match on questions with one right answer each, by kind, and shows five answers."""

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
SHOWN = 5


def read_questions(path: Path) -> list[dict[str, str]]:
    """The file's rows; ValueError where it is no parquet file with the columns prompt, response and kind."""
    try:
        return pq.read_table(path, columns=["prompt", "response", "kind"]).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} is no parquet file with prompt, response and kind: {error}") from error


@torch.inference_mode()
def answer(model_dir: Path, prompts: list[str]) -> list[str]:
    """The model's greedy answers, in order; ValueError where the directory holds no model."""
    if not (model_dir / "config.json").is_file():  # transformers would ask a hub for a directory that is not there
        raise ValueError(f"{model_dir} holds no config.json: name an exported model, such as .demo/run/best")
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
    """The share of right answers, 0 to 1, and a table of it by kind."""
    right_by_kind = defaultdict(list)
    for question, text in zip(questions, answers, strict=True):
        right_by_kind[question["kind"]].append(text == question["response"])
    everything = [right for marks in right_by_kind.values() for right in marks]
    rows = [*sorted(right_by_kind.items()), ("all", everything)]
    lines = [f"{kind:<12} {sum(marks):>5} of {len(marks):>5} {sum(marks) / len(marks):>7.1%}" for kind, marks in rows]
    return sum(everything) / len(everything), "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mark an exported model by exact match.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("test_file", type=Path)
    parser.add_argument("--minimum", type=float, default=0.0, help="exit 1 below this share of right answers, 0 to 1")
    options = parser.parse_args()
    try:
        questions = read_questions(options.test_file)
        answers = answer(options.model_dir, [question["prompt"] for question in questions])
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    share, table = exact_match_table(questions, answers)
    print(table)
    for question, text in list(zip(questions, answers, strict=True))[:SHOWN]:
        mark = "right" if text == question["response"] else f"wrong, it is {question['response']}"
        print(f"{question['prompt']}  →  {text}  ({mark})")
    return 0 if share >= options.minimum else 1


if __name__ == "__main__":
    sys.exit(main())
