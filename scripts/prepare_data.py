"""Cleans data files and writes their pairs as one parquet file, with a count of what was dropped and why.

python scripts/prepare_data.py IN... --output OUT.parquet [--validation_output VALID.parquet] [--validation_share 0.01]
    [--prompt_column NAME] [--response_column NAME] [--max_chars 2048] [--max_context_chars 8192] [--single_turn]
    [--report [--tokenizer_dir DIR] [--max_seq_len 256]] [--strict] [--overwrite]

Outputs are written atomically. A pair of a dialogue keeps its system text and the turns before it in the columns
`system` and `history`. A hash of the pair, or of a dialogue's first two, decides if it goes to VALID.parquet, so a pair
stays there when more data is added. Host memory: about 120 bytes per pair kept, to find duplicates, and one row group.
An input that cannot be read to its end is left out as a whole, and named; with --strict nothing is written then.
Exit codes: 0 written, 2 input or options refused or nothing kept, 1 disk or permission.
A row that cannot be read is malformed: a broken line, a null, more cells than columns. Damaged text contains U+FFFD;
private use means characters without a standard meaning.
"""

import argparse
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

from model.commands.data_report import SHORTENED, count_table, print_problems, print_report, print_written  # noqa: E402
from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.cleaning import clean_pair  # noqa: E402
from model.data.columns import find_columns, list_names  # noqa: E402
from model.data.conversation import Context  # noqa: E402
from model.data.file_list import files_in  # noqa: E402
from model.data.prepared_pairs import HasContext, PreparedPair, in_context, write_parquet  # noqa: E402
from model.data.readers import NoRows, read_pairs, read_pairs_in_context, read_rows  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.display.meanwhile import activity_shown  # noqa: E402
from model.runtime.activity import advance, now_doing  # noqa: E402
from model.runtime.atomic_io import output_directory  # noqa: E402

VALIDATION_SHARE = 0.01
MAX_PROBLEMS = 3  # malformed rows that are reported per file


@dataclass
class Input:
    """A file to read: its counts by COLUMNS, its first malformed rows, its unused content, why it cannot be read."""

    path: str
    counts: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    ignored: Counter = field(default_factory=Counter)
    failure: str = ""

    def drop_malformed(self, problem: str) -> None:
        self.counts.update(read=1, malformed=1)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def main() -> None:
    options = parse_options()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # file names and the terminal may not be UTF-8
    try:
        with activity_shown("prepare_data"):
            inputs, written = prepare(options)
    except (ValueError, OSError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    print(count_table(inputs))
    print_problems(inputs)
    print_written(written)
    if options.report:
        with activity_shown("prepare_data"):
            print_report(list(written), options.tokenizer_dir, options.max_seq_len)


def parse_options() -> argparse.Namespace:
    parser = ScriptParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IN",
        help="json, jsonl, csv, tsv, parquet and arrow files (.gz, .zst), folders, or Hugging Face datasets",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="OUT.parquet")
    parser.add_argument("--validation_output", type=Path, metavar="VALID.parquet", help="where validation pairs go")
    parser.add_argument("--validation_share", type=float, metavar="SHARE", help=f"of all pairs ({VALIDATION_SHARE})")
    parser.add_argument("--prompt_column", default="", metavar="NAME", help="found by its name when not given")
    parser.add_argument("--response_column", default="", metavar="NAME", help="found by its name when not given")
    parser.add_argument("--max_chars", default=2048, type=int, help="longest side kept, in characters (%(default)s)")
    parser.add_argument("--max_context_chars", default=8192, type=int, help="of the turns before a pair (%(default)s)")
    parser.add_argument("--single_turn", action="store_true", help="leave out system texts and the turns before a pair")
    parser.add_argument("--report", action="store_true", help="say what the outputs hold, and draw their lengths")
    parser.add_argument("--tokenizer_dir", default=Path("model_save/tokenizer"), type=Path, help="for --report")
    parser.add_argument("--max_seq_len", default=256, type=int, help="for --report: where training cuts (%(default)s)")
    parser.add_argument("--strict", action="store_true", help="write nothing if an input cannot be read to its end")
    parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> tuple[list[Input], dict[Path, array]]:
    """Write the outputs, or nothing if it raises ValueError; returns the inputs and a hash of each prompt by output."""
    outputs = check_outputs(options)
    for name in ("max_chars", "max_context_chars", "max_seq_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}={getattr(options, name)}: give at least 1")
    share = check_share(options)
    inputs = list(map(Input, check_inputs(list_files(options.inputs), outputs)))
    partials = [output.with_name(f".{output.name}.{os.getpid()}.partial") for output in outputs]
    with ExitStack() as stack:
        for partial in partials:
            stack.enter_context(output_directory(partial.parent))
            stack.callback(partial.unlink, missing_ok=True)
        prompts = write_readable(inputs, options, partials, share)
        refuse_result(inputs, list(map(len, prompts)), share)
        for partial, output in zip(partials, outputs, strict=True):
            os.replace(partial, output)
    return inputs, dict(zip(outputs, prompts, strict=True))


def write_readable(
    inputs: list[Input], options: argparse.Namespace, paths: list[Path], share: float, with_context: bool = False
) -> list[array]:
    """Write the pairs of all inputs that can be read to their end; returns a hash of each prompt by file.

    If an input fails after some of its pairs were written, everything is written again without that input; at the first
    pair with a context, again with columns for it, so that files of plain pairs have none.
    """
    try:
        prompts = write_parquet(clean_files(inputs, options), paths, share, with_context)
    except HasContext:
        forget(inputs)
        return write_readable(inputs, options, paths, share, with_context=True)
    failed = [source for source in inputs if source.failure]
    if failed and options.strict:
        raise ValueError("\n".join([*(source.failure for source in failed), "nothing was written (--strict)"]))
    if not any(source.counts["kept"] for source in failed):
        return prompts
    forget(inputs)
    return write_readable(inputs, options, paths, share, with_context)


def forget(inputs: list[Input]) -> None:
    """Set back what was counted for the inputs that are read again."""
    for source in inputs:
        if source.counts["kept"] or not source.failure:
            source.counts, source.problems, source.ignored = Counter(), [], Counter()


def refuse_result(inputs: list[Input], counts: list[int], share: float) -> None:
    """Raise ValueError if a file has no pairs; `counts` are the numbers of pairs by file."""
    if not counts[0]:
        reasons = [source.failure for source in inputs if source.failure]
        if len(reasons) < len(inputs):
            reasons.append("no pair is left, so nothing was written:\n" + count_table(inputs))
        raise ValueError("\n".join(reasons))
    if not all(counts):
        raise ValueError(f"--validation_share={share}: none of {counts[0]:,} pairs; give more, nothing was written")


def check_outputs(options: argparse.Namespace) -> list[Path]:
    """The files to write; raises ValueError if a path cannot be an output."""
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
    if len(set(map(identity, outputs.values()))) < len(outputs):
        raise ValueError(f"--output and --validation_output are both {options.output}: give two names")
    return list(outputs.values())


def list_files(paths: list[str]) -> list[str]:
    """The paths, with the files in a folder for the folder, which are named on stderr."""
    found = []
    for path in paths:
        files = files_in(path)
        if files != [path]:
            names = ", ".join(Path(file).name for file in files)
            print("prepare_data:", texts_here()("prepare.folder", path=path, names=names), file=sys.stderr)
        found += files
    return found


def check_inputs(paths: list[str], outputs: list[Path]) -> list[str]:
    """The inputs without repeated files; raises ValueError if one of them is also an output."""
    written = {identity(output): output for output in outputs}
    found = {}
    for path in paths:
        key = identity(Path(path))
        if key in written:
            raise ValueError(f"{path}: it is also the output {written[key]}; give the output another name")
        if key in found:
            print("prepare_data:", texts_here()("prepare.same_file", path=path, other=found[key]), file=sys.stderr)
        found.setdefault(key, path)
    return list(found.values())


def identity(path: Path) -> tuple[int, int] | str:
    """A value that is equal for two paths to the same file, even if the file does not exist yet."""
    try:
        status = path.stat()
        return status.st_dev, status.st_ino
    except OSError:
        return os.path.realpath(path)


def check_share(options: argparse.Namespace) -> float:
    """The share of the pairs for validation; raises ValueError if it is no share or no file is given for it."""
    share = VALIDATION_SHARE if options.validation_share is None else options.validation_share
    if not 0 < share < 1:
        raise ValueError(f"--validation_share={share}: a share is above 0 and below 1")
    if options.validation_share is not None and not options.validation_output:
        raise ValueError(f"--validation_share={share}: there is no file for it; add --validation_output VALID.parquet")
    return share


def clean_files(inputs: list[Input], options: argparse.Namespace) -> Iterator[PreparedPair]:
    """Yield the cleaned pairs without duplicates over all files; sets the inputs' counts and failures."""
    seen = set()
    for number, source in enumerate(inputs, start=1):
        if source.failure:
            continue
        now_doing(texts_here()("prepare.reading", path=source.path, number=number, count=len(inputs)))
        try:
            yield from clean_file(source, options, seen)
        except (ValueError, OSError) as error:
            source.failure = str(error)


def clean_file(source: Input, options: argparse.Namespace, seen: set[bytes]) -> Iterator[PreparedPair]:
    """Yield the cleaned pairs not in `seen` and add them to it. Raises ValueError if one side is always empty."""
    has_prompt = has_response = False
    for prompt, response, context in pairs_of(source, options):
        cleaned = clean_pair(prompt, response, options.max_chars)
        has_prompt = has_prompt or cleaned != "empty prompt"
        has_response = has_response or bool(response.strip())
        if not isinstance(cleaned, str):
            pair, is_shortened = in_context(cleaned, context, options.max_chars, options.max_context_chars)
            source.counts[SHORTENED] += is_shortened
            cleaned = "duplicate" if (key := pair.key()) in seen else "kept"
        source.counts["read"] += 1
        advance(1)
        source.counts[cleaned] += 1
        if cleaned == "kept":
            seen.add(key)
            yield pair
    if not (has_prompt and has_response):
        raise ValueError(describe_empty_side(source, has_prompt, options))


def pairs_of(source: Input, options: argparse.Namespace) -> Iterator[tuple[str, str, Context | None]]:
    """Yield the pairs of readable rows and count malformed ones. Raises ValueError if no row is readable."""
    try:
        columns = options.prompt_column, options.response_column
        if options.single_turn:
            pairs = read_pairs(source.path, *columns, source.drop_malformed, source.ignored)
            yield from ((prompt, response, None) for prompt, response in pairs)
        else:
            yield from read_pairs_in_context(source.path, *columns, source.drop_malformed, source.ignored)
    except NoRows:
        if not source.problems:
            raise
        raise ValueError(f"none of {source.counts['malformed']:,} rows can be read: {source.problems[0]}") from None


def describe_empty_side(source: Input, has_prompt: bool, options: argparse.Namespace) -> str:
    """The error message for a file without a prompt, or without a response, in any row."""
    given = options.prompt_column, options.response_column
    names = tuple(next(read_rows(source.path, *given, on_malformed=lambda problem: None)))
    num_rows = source.counts["read"] - source.counts["malformed"]
    prompts, responses = find_columns(names, *given)
    side = "response" if has_prompt else "prompt"
    used = responses if has_prompt else dict.fromkeys(name for columns in prompts for name in columns)
    return (
        f"{source.path}: the {side} is empty in all {num_rows:,} rows (read from {', '.join(map(repr, used))}; columns "
        f"found: {list_names(names)}); name the right one with --{side}_column=NAME, or leave the file out"
    )


if __name__ == "__main__":
    main()
