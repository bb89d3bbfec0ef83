"""Trains a tokenizer on files of pairs, or on text files with one text per line, and prints a summary.

    python scripts/train_tokenizer.py data/train.parquet more.jsonl --output_dir model_save/tokenizer --vocab_size 8000
        [--kind byte_level] [--sentinels N] [--prompt_column NAME] [--response_column NAME] [--encoding NAME]
        [--overwrite]

--kind=character is for a T5: Han, other letters and signs never share a token. --kind=byte_level is for a decoder
(--model=mini): it is Qwen's kind, which other engines read. One row in a hundred is held out to measure characters per
token.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.documents import in_batches, texts_of  # noqa: E402
from model.data.encodings import check_encoding  # noqa: E402
from model.data.file_list import SUFFIXES, files_in  # noqa: E402
from model.data.file_request import FileRequest  # noqa: E402
from model.data.readers import read_items  # noqa: E402
from model.data.tokenizer import NUM_SENTINELS, count_merged_tokens, load_tokenizer  # noqa: E402
from model.data.tokenizer_training import KINDS, train_tokenizer  # noqa: E402
from model.data.turn_template import write_turn_template  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.display.console import padded  # noqa: E402
from model.display.meanwhile import activity_shown  # noqa: E402
from model.runtime.activity import advance, now_doing  # noqa: E402
from model.runtime.atomic_io import output_directory  # noqa: E402

HELD_OUT_EVERY = 100  # rows
MAX_HELD_OUT_ROWS = 5_000


def read_rows_of_texts(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each row of all files: a document, or what is said in a conversation."""
    paths = [Path(file) for path in options.files for file in files_in(str(path), (*SUFFIXES, ".txt"))]
    for number, path in enumerate(paths, start=1):
        now_doing(texts_here()("tokenizer.reading", path=path, number=number, count=len(paths)))
        asked = FileRequest(options.prompt_column, options.response_column, encoding=options.encoding)
        yield from map(texts_of, read_items(path, asked))


def texts_to_learn(rows: Iterator[tuple[str, ...]], held_out: list[str]) -> Iterator[str]:
    """Yield the texts of the rows; one row in HELD_OUT_EVERY, up to MAX_HELD_OUT_ROWS, goes to `held_out` instead."""
    num_held_out_rows = 0
    for index, row in enumerate(rows):
        advance(1)
        if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 and num_held_out_rows < MAX_HELD_OUT_ROWS:
            held_out.extend(row)
            num_held_out_rows += 1
        else:
            yield from row
    now_doing(texts_here()("tokenizer.learning"))


def check_output(output_dir: Path, overwrite: bool) -> None:
    """Raise ValueError if the directory has a tokenizer already."""
    if (output_dir / "tokenizer.json").exists() and not overwrite:
        raise ValueError(f"--output_dir={output_dir}: it has a tokenizer already; give another, or add --overwrite")


def print_summary(output_dir: Path, held_out: list[str], seconds: float) -> None:
    tokenizer = load_tokenizer(output_dir)
    num_tokens = sum(len(ids) for texts in in_batches(held_out) for ids in tokenizer.encode_batch(texts))
    text, density = texts_here(), sum(map(len, held_out)) / num_tokens if num_tokens else None
    found = {
        "directory": text("tokenizer.directory.of", directory=output_dir, fingerprint=tokenizer.fingerprint),
        "size": text("tokenizer.tokens", count=tokenizer.vocab_size),
        "merged": text("tokenizer.tokens", count=count_merged_tokens(tokenizer)),
        "density": text("tokenizer.unmeasured") if density is None else f"{density:.3f}",
        "time": text("tokenizer.seconds", seconds=seconds),
    }
    for name, said in found.items():
        print(padded(text(f"tokenizer.{name}"), 22) + said)


def parse_arguments() -> argparse.Namespace:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files as of prepare_data.py and txt, folders, or datasets")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=8000, help="tokens, at least 400 with 100 sentinels")
    parser.add_argument(
        "--kind", default="character", choices=KINDS, help="character for a T5, byte_level for a decoder"
    )
    parser.add_argument(
        "--sentinels",
        type=int,
        default=NUM_SENTINELS,
        help="tokens that stand for the gaps of objective=span",
    )
    parser.add_argument("--prompt_column", default="", help="found by name when not given")
    parser.add_argument("--response_column", default="", help="found by name when not given")
    parser.add_argument("--encoding", default="", help="of text files; found when not given")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # file names and the terminal may not be UTF-8
    held_out: list[str] = []
    started = time.perf_counter()
    try:
        check_encoding(options.encoding or "utf-8")
        check_output(options.output_dir, options.overwrite)
        texts = texts_to_learn(read_rows_of_texts(options), held_out)
        with output_directory(options.output_dir), activity_shown("train_tokenizer"):
            train_tokenizer(texts, options.vocab_size, options.output_dir, options.kind, options.sentinels)
            if options.kind == "byte_level":  # ChatML with thoughts and tools
                write_turn_template(load_tokenizer(options.output_dir), options.output_dir)
        print_summary(options.output_dir, held_out, time.perf_counter() - started)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
