"""Cleans data files and writes their pairs as one parquet file, with a count of what was dropped and why.

python scripts/prepare_data.py IN... --output OUT.parquet [--validation_output VALID.parquet] [--validation_share 0.01]
    [--prompt_column NAME] [--response_column NAME] [--max_chars 2048] [--overwrite]

Reads .json, .jsonl, .csv, .tsv and .parquet. A file appears whole or not at all. A hash of the pair decides whether
it goes to VALID.parquet, so it does too when more data comes. Host memory: about 100 bytes for each pair kept, to know
duplicates, and a row group. Exit codes: 0 written, 2 input or options refused, 1 disk or
permission. Malformed is a row that cannot be read: a broken line, a null, cells that no column is for. Damaged text is
text with U+FFFD in it; private use means characters that no two fonts show alike.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

from model.durable import make_output_directory
from model.pairs import REASONS, NoRows, clean_pair, find_columns, read_pairs, read_rows

ROW_GROUP_PAIRS = 20_000
SCHEMA = pa.schema({"prompt": pa.string(), "response": pa.string()})
COLUMNS = ("read", "kept", "malformed", *REASONS, "duplicate")
VALIDATION_SHARE = 0.01
NUM_TOLD = 3  # malformed rows of a file that are named


@dataclass
class Input:
    """A file to read and what became of its rows: their number, by COLUMNS, and the first malformed ones in words."""

    path: str
    counts: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def drop_malformed(self, problem: str) -> None:
        self.counts.update(read=1, malformed=1)
        if len(self.problems) < NUM_TOLD:
            self.problems.append(problem)


def main() -> None:
    options = parse_options()
    try:
        inputs, written = prepare(options)
    except (ValueError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    print(format_counts(inputs))
    print_problems(inputs)
    for path, count in written.items():
        print(f"{path}: {count:,} pairs written")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", metavar="IN", help="a .json, .jsonl, .csv, .tsv or .parquet file")
    parser.add_argument("--output", required=True, type=Path, metavar="OUT.parquet")
    parser.add_argument("--validation_output", type=Path, metavar="VALID.parquet", help="for pairs to be kept apart")
    parser.add_argument("--validation_share", type=float, metavar="SHARE", help=f"of them ({VALIDATION_SHARE})")
    parser.add_argument("--prompt_column", default="", metavar="NAME", help="found by its name when not given")
    parser.add_argument("--response_column", default="", metavar="NAME", help="found by its name when not given")
    parser.add_argument("--max_chars", default=2048, type=int, help="longest side kept, in characters (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> tuple[list[Input], dict[Path, int]]:
    """Writes the output; gives the inputs in order, and the pairs written to each file.

    Raises ValueError, with nothing written.
    """
    outputs = check_outputs(options)
    if options.max_chars < 1:
        raise ValueError(f"--max_chars={options.max_chars}: a side needs at least 1 character")
    share = check_share(options)
    inputs = [Input(path) for path in options.inputs]
    for output in outputs:
        make_output_directory(output.parent)
    partials = [output.with_name(f".{output.name}.{os.getpid()}.partial") for output in outputs]
    try:
        counts = write_parquet(clean_files(inputs, options), partials, share)
        if not counts[0]:
            raise ValueError("no pair is left, so nothing was written:\n" + format_counts(inputs))
        if not all(counts):
            raise ValueError(f"--validation_share={share}: none of {counts[0]:,} pairs; give more, nothing was written")
        for partial, output in zip(partials, outputs, strict=True):
            os.replace(partial, output)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    return inputs, dict(zip(outputs, counts, strict=True))


def check_outputs(options: argparse.Namespace) -> list[Path]:
    """The files to write; raises ValueError where one must not be."""
    outputs = dict(output=options.output)
    if options.validation_output:
        outputs["validation_output"] = options.validation_output
    for name, output in outputs.items():
        if output.is_dir():
            raise ValueError(f"--{name}={output}: it is a folder; name a file, for example {output}/pairs.parquet")
        if output.suffix != ".parquet":
            raise ValueError(f"--{name}={output}: the output is a parquet file; give it a name that ends in .parquet")
        if output.exists() and not options.overwrite:
            raise ValueError(f"--{name}={output}: it is there already; give another name, or add --overwrite")
    if len(set(outputs.values())) < len(outputs):
        raise ValueError(f"--output and --validation_output are both {options.output}: give two names")
    return list(outputs.values())


def check_share(options: argparse.Namespace) -> float:
    """The share of the pairs to keep apart; raises ValueError where it is none, or has nowhere to go."""
    share = VALIDATION_SHARE if options.validation_share is None else options.validation_share
    if not 0 < share < 1:
        raise ValueError(f"--validation_share={share}: a share is above 0 and below 1")
    if options.validation_share is not None and not options.validation_output:
        raise ValueError(f"--validation_share={share}: there is no file for it; add --validation_output VALID.parquet")
    return share


def clean_files(inputs: list[Input], options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The pairs worth keeping, each once over all files; fills in the counts. ValueError if a side is always empty."""
    seen = set()
    for source in inputs:
        has_prompt = has_response = False
        for pair in pairs_of(source, options):
            cleaned = clean_pair(*pair, options.max_chars)
            has_prompt = has_prompt or cleaned != "empty prompt"
            has_response = has_response or bool(pair[1].strip())
            if not isinstance(cleaned, str) and (key := fingerprint(cleaned)) in seen:
                cleaned = "duplicate"
            source.counts["read"] += 1
            source.counts[cleaned if isinstance(cleaned, str) else "kept"] += 1
            if not isinstance(cleaned, str):
                seen.add(key)
                yield cleaned
        if not (has_prompt and has_response):
            raise ValueError(describe_empty_side(source, has_prompt, options))


def pairs_of(source: Input, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The pairs of the rows that can be read; the others are counted. ValueError if there are only others."""
    try:
        yield from read_pairs(source.path, options.prompt_column, options.response_column, source.drop_malformed)
    except NoRows:
        if not source.problems:
            raise
        raise ValueError(f"none of {source.counts['malformed']:,} rows can be read: {source.problems[0]}") from None


def fingerprint(pair: tuple[str, str]) -> bytes:
    """16 bytes that differ for different pairs; clean text holds no NUL, so the two sides cannot run together."""
    return blake2b("\0".join(pair).encode(), digest_size=16).digest()


def describe_empty_side(source: Input, has_prompt: bool, options: argparse.Namespace) -> str:
    """What to tell the user of a file that has no prompt, or no response, in any row."""
    names = tuple(next(read_rows(source.path, on_malformed=lambda problem: None)))
    num_rows = source.counts["read"] - source.counts["malformed"]
    prompts, responses = find_columns(names, options.prompt_column, options.response_column)
    side = "response" if has_prompt else "prompt"
    used = responses if has_prompt else dict.fromkeys(name for columns in prompts for name in columns)
    return (
        f"{source.path}: the {side} is empty in all {num_rows:,} rows (read from {', '.join(map(repr, used))}; columns "
        f"found: {', '.join(map(repr, names))}); name the right one with --{side}_column=NAME, or leave the file out"
    )


def write_parquet(pairs: Iterator[tuple[str, str]], paths: list[Path], validation_share: float) -> list[int]:
    """Writes the pairs as they come, a row group of ROW_GROUP_PAIRS at a time; gives the number in each file.

    Where there is a second path, that share of them goes there.
    """
    counts, groups = [0] * len(paths), [[] for _ in paths]
    limit = int(validation_share * 2**64) if len(paths) > 1 else 0
    with ExitStack() as stack:
        writers = [stack.enter_context(pq.ParquetWriter(path, SCHEMA, compression="zstd")) for path in paths]
        for pair in pairs:
            place = int(int.from_bytes(fingerprint(pair)[:8]) < limit)
            counts[place] += 1
            groups[place].append(pair)
            if len(groups[place]) == ROW_GROUP_PAIRS:
                write_group(writers[place], groups[place])
        for writer, group in zip(writers, groups, strict=True):
            write_group(writer, group)
    return counts


def write_group(writer: pq.ParquetWriter, group: list[tuple[str, str]]) -> None:
    """Writes the pairs of `group` as a row group, and empties it."""
    if group:
        writer.write_table(pa.table(list(zip(*group, strict=True)), schema=SCHEMA))
        group.clear()


def format_counts(inputs: list[Input]) -> str:
    """A table: a line for each input and one for their total, a column for each of COLUMNS."""
    total = sum((source.counts for source in inputs), Counter())
    rows = [(Path(source.path).name, source.counts) for source in inputs] + [("total", total)]
    width = max(len(name) for name, _ in rows)
    lines = ["  ".join([" " * width, *(column.rjust(max(9, len(column))) for column in COLUMNS)])]
    for name, counts in rows:
        cells = (f"{counts[column]:,}".rjust(max(9, len(column))) for column in COLUMNS)
        lines.append("  ".join([name.ljust(width), *cells]))
    return "\n".join(lines)


def print_problems(inputs: list[Input]) -> None:
    """Names the first malformed rows of each file."""
    for source in inputs:
        for problem in source.problems:
            print(f"prepare_data: left out: {problem}", file=sys.stderr)
        if (others := source.counts["malformed"] - len(source.problems)) > 0:
            print(f"prepare_data: left out: {others:,} more rows of {source.path}", file=sys.stderr)


if __name__ == "__main__":
    main()
