"""Train a tokenizer on files of pairs, or on text files with one text a line, and print what it is worth.

    python scripts/train_tokenizer.py data/train.parquet more.jsonl --output_dir model_save/tokenizer --vocab_size 8000
        [--prompt_column NAME] [--response_column NAME] [--overwrite]

One row in a hundred is kept out of the training to measure characters per token.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.data.readers import read_pairs
from model.data.tokenizer import count_merged_tokens, load_tokenizer, train_tokenizer
from model.runtime.atomic_io import make_output_directory

HELD_EVERY = 100  # rows
MAX_HELD_ROWS = 5_000
MAX_LINE_CHARS = 65_536


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, very long ones in parts; ValueError if it is missing or not UTF-8."""
    if not path.is_file():
        raise ValueError(f"no file at {path}: give paths of parquet, json, jsonl, csv, tsv or txt files")
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from iter(lambda: file.readline(MAX_LINE_CHARS), "")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): convert it, or give the data as parquet") from error


def read_rows_of_texts(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The texts of each row of each file: a line, or a prompt and a response."""
    for path in options.files:
        if path.suffix.lower() == ".txt":
            yield from ((line.rstrip("\r\n"),) for line in read_lines(path))
        else:
            yield from read_pairs(path, options.prompt_column, options.response_column)


def texts_to_learn(rows: Iterator[tuple[str, ...]], held: list[str]) -> Iterator[str]:
    """The texts of the rows, except one row in HELD_EVERY, whose texts go to held while there is room."""
    num_held_rows = 0
    for index, row in enumerate(rows):
        if index % HELD_EVERY == HELD_EVERY - 1 and num_held_rows < MAX_HELD_ROWS:
            held.extend(row)
            num_held_rows += 1
        else:
            yield from row


def prepare_output(output_dir: Path, overwrite: bool) -> None:
    """Make the directory, before the long work; ValueError if it cannot be made or holds a tokenizer already."""
    if (output_dir / "tokenizer.json").exists() and not overwrite:
        raise ValueError(f"--output_dir={output_dir}: it holds a tokenizer already; give another, or add --overwrite")
    make_output_directory(output_dir)


def print_summary(output_dir: Path, held: list[str], seconds: float) -> None:
    tokenizer = load_tokenizer(output_dir)
    num_tokens = sum(map(len, tokenizer.encode_batch(held)))
    density = f"{sum(map(len, held)) / num_tokens:.3f}" if num_tokens else "not measured (fewer than 100 rows)"
    print(f"tokenizer             {output_dir} (fingerprint {tokenizer.fingerprint})")
    print(f"vocabulary            {tokenizer.vocab_size} tokens")
    print(f"multi-character       {count_merged_tokens(tokenizer)} tokens")
    print(f"characters per token  {density}")
    print(f"time                  {seconds:.1f} s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="parquet, json, jsonl, csv, tsv or txt")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=8000, help="tokens, at least 300")
    parser.add_argument("--prompt_column", default="", help="found by name when not given")
    parser.add_argument("--response_column", default="", help="found by name when not given")
    parser.add_argument("--overwrite", action="store_true", help="replace the tokenizer that is there")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8, nor the terminal
    held: list[str] = []
    started = time.perf_counter()
    try:
        prepare_output(options.output_dir, options.overwrite)
        train_tokenizer(texts_to_learn(read_rows_of_texts(options), held), options.vocab_size, options.output_dir)
        print_summary(options.output_dir, held, time.perf_counter() - started)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
