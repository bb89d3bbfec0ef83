"""Cleans data files and writes their conversations as one parquet file, with a count of what was dropped and why.

python scripts/prepare_data.py IN... --output OUT.parquet [--validation_output VALID.parquet] [--validation_share 0.01]
    [--prompt_column NAME] [--response_column NAME] [--encoding NAME] [--max_chars 2048] [--max_context_chars 65536]
    [--single_turn] [--report [--tokenizer_dir DIR] [--max_seq_len 256]] [--strict] [--overwrite]

Outputs are written atomically. A conversation is a row, in the columns `messages` and `tools`; where all are single
pairs the columns are `prompt` and `response`, and where all rows are plain text, `text`. A hash of a conversation's
first texts decides if it goes to VALID.parquet, so it stays there when more data is added. Host memory: about 120 bytes
per conversation kept, to find duplicates, and one row group.
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

import pyarrow as pa  # noqa: E402

from model.commands.data_report import SHORTENED, count_table, print_problems, print_report, print_written  # noqa: E402
from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.cleaning import clean_conversation, clean_document  # noqa: E402
from model.data.columns import find_columns, list_names  # noqa: E402
from model.data.conversation import Conversation, Document  # noqa: E402
from model.data.encodings import check_encoding  # noqa: E402
from model.data.file_list import SUFFIXES, files_in  # noqa: E402
from model.data.file_request import FileRequest  # noqa: E402
from model.data.prepared import PAIRS, NeedsForm, key_of, write_parquet  # noqa: E402
from model.data.readers import NoRows, followed, read_items  # noqa: E402
from model.data.t5_text import single_pairs  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.display.meanwhile import activity_shown  # noqa: E402
from model.runtime.activity import advance, now_doing  # noqa: E402
from model.runtime.atomic_io import output_directory  # noqa: E402

VALIDATION_SHARE = 0.01
PARTS = dict(prompt="user", response="assistant")  # of a pair, and whose turns they are
MAX_PROBLEMS = 3  # malformed rows that are reported per file


@dataclass
class Input:
    """A file to read: its counts by COLUMNS, its first malformed rows, its unused content, why it cannot be read."""

    path: str
    counts: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    ignored: Counter = field(default_factory=Counter)
    failure: str = ""
    asked: FileRequest = field(default_factory=FileRequest)  # what was asked of it when it was last read

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
    parser.add_argument("inputs", nargs="+", metavar="IN", help="data files (.gz, .zst), folders, datasets")
    parser.add_argument("--output", required=True, type=Path, metavar="OUT.parquet")
    parser.add_argument("--validation_output", type=Path, metavar="VALID.parquet", help="where validation pairs go")
    parser.add_argument("--validation_share", type=float, metavar="SHARE", help=f"of all pairs ({VALIDATION_SHARE})")
    parser.add_argument("--prompt_column", default="", metavar="NAME", help="found by its name when not given")
    parser.add_argument("--response_column", default="", metavar="NAME", help="found by its name when not given")
    parser.add_argument("--encoding", default="", metavar="NAME", help="of text files; found when not given")
    parser.add_argument("--max_chars", default=2048, type=int, help="longest text kept, in characters (%(default)s)")
    parser.add_argument(
        "--max_context_chars", default=65536, type=int, help="then a conversation begins anew (%(default)s)"
    )
    parser.add_argument("--single_turn", action="store_true", help="each answer with its question alone")
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
    check_encoding(options.encoding or "utf-8")
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
    inputs: list[Input], options: argparse.Namespace, paths: list[Path], share: float, form: pa.Schema = PAIRS
) -> list[array]:
    """Write what all inputs that can be read to their end hold; returns a hash of each prompt by file.

    If an input fails after some of its rows were written, everything is written again without that input; at the first
    row that does not fit the form of the file, again in one that holds it.
    """
    try:
        prompts = write_parquet(clean_files(inputs, options), paths, share, form)
    except NeedsForm as needs:
        forget(inputs)
        return write_readable(inputs, options, paths, share, needs.form)
    failed = [source for source in inputs if source.failure]
    if failed and options.strict:
        raise ValueError("\n".join([*(source.failure for source in failed), "nothing was written (--strict)"]))
    if not any(source.counts["kept"] for source in failed):
        return prompts
    forget(inputs)
    return write_readable(inputs, options, paths, share, form)


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
            reasons.append("no row is left, so nothing was written:\n" + count_table(inputs))
        raise ValueError("\n".join(reasons))
    if not all(counts):
        raise ValueError(
            f"--validation_share={share}: of {counts[0]:,} rows none came into it, so nothing was written; type a "
            f"larger share, such as --validation_share={min(10 / counts[0], 0.5):.2g}"
        )


def check_outputs(options: argparse.Namespace) -> list[Path]:
    """The files to write; raises ValueError if a path cannot be an output."""
    outputs = {name: path for name in ("output", "validation_output") if (path := getattr(options, name))}
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
        files = files_in(path, (*SUFFIXES, ".txt"))
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


def clean_files(inputs: list[Input], options: argparse.Namespace) -> Iterator[Conversation | Document]:
    """Yield what is kept of all files, without duplicates; sets the inputs' counts and failures."""
    seen = set()
    for number, source in enumerate(inputs, start=1):
        if source.failure:
            continue
        now_doing(texts_here()("prepare.reading", path=source.path, number=number, count=len(inputs)))
        try:
            yield from clean_file(source, options, seen)
        except (ValueError, OSError) as error:
            source.failure = str(error)


def clean_file(source: Input, options: argparse.Namespace, seen: set[bytes]) -> Iterator[Conversation | Document]:
    """Yield what is kept of a file and not in `seen`, and add it. Raises ValueError if one part is always empty."""
    counts, filled = source.counts, set()
    for item in items_of(source, options):
        if isinstance(item, Document):
            parts, reason = clean_document(item)
            filled.update(PARTS)
        else:
            parts, reason = clean_conversation(item, options.max_chars, options.max_context_chars)
            if len(filled) < len(PARTS):
                roles = {turn.role for turn in item.turns if turn.text.strip() or turn.calls}
                filled |= {part for part, role in PARTS.items() if role in roles}
        fresh = [part for part in parts if (key := key_of(part)) not in seen and not seen.add(key)]
        counts["read"] += 1
        counts["kept" if fresh else "duplicate" if parts else reason] += 1
        counts[SHORTENED] += bool(fresh and reason)
        advance(1)
        yield from fresh
    for part in PARTS:
        if part not in filled:
            raise ValueError(describe_empty_part(source, part, options))


def items_of(source: Input, options: argparse.Namespace) -> Iterator[Conversation | Document]:
    """Yield what readable rows say and count malformed ones. Raises ValueError if no row is readable."""
    columns = options.prompt_column, options.response_column
    asked = source.asked = FileRequest(*columns, source.drop_malformed, source.ignored, options.encoding)
    try:
        items = followed(read_items(source.path, asked))
        yield from single_pairs(items, source.ignored) if options.single_turn else items
    except NoRows:
        if not source.problems:
            raise
        raise ValueError(f"none of {source.counts['malformed']:,} rows can be read: {source.problems[0]}") from None


def describe_empty_part(source: Input, part: str, options: argparse.Namespace) -> str:
    """The error message for a file in which one part is empty in every row."""
    names = source.asked.names
    prompts, responses = find_columns(names, options.prompt_column, options.response_column)
    used = responses if part == "response" else dict.fromkeys(name for columns in prompts for name in columns)
    num_rows = source.counts["read"] - source.counts["malformed"]
    return (
        f"{source.path}: the {part} is empty in all {num_rows:,} rows (read from {', '.join(map(repr, used))}; columns "
        f"found: {list_names(names)}); name the right one with --{part}_column=NAME, or leave the file out"
    )


if __name__ == "__main__":
    main()
