"""What prepared files hold: lengths, what is cut, duplicates, what a tokenizer splits to bytes; a picture of lengths.

One pass over each file. Host memory: about 550 bytes a pair with near duplicates (1,000,000 pairs: 0.7 GiB with all
else), 16 without.
"""

import io
import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.cells import cell_len

from model.data.cleaning import REASONS
from model.data.conversation import Document
from model.data.file_request import FileRequest, describe_ignored
from model.data.near_duplicates import SIMILARITY, Signatures
from model.data.prepared import key_of, prompt_number
from model.data.readers import read_items
from model.data.t5_text import encode_questions, exchanges
from model.data.tokenizer import BYTE_TOKENS, ChatTokenizer, load_tokenizer
from model.display.catalogue import texts_here
from model.display.console import padded
from model.runtime.activity import advance, now_doing
from model.runtime.atomic_io import write_file

COLUMNS = ("read", "kept", "malformed", *REASONS, "duplicate")
RARE = {"not learnt"}  # shown where it was counted
SHORTENED = "context shortened"
UNITS = dict(prompt="pairs", messages="conversations", text="texts")  # by the first column
BATCH_ROWS, NO_LIMIT = 2_000, 1 << 40
PERCENTILES = (50, 90, 95, 99, 100)
PARTS = ("prompt", "response")  # of a pair
NUM_SHOWN = 10  # characters, and near duplicates
NUM_BARS = 60


@dataclass
class Contents:
    """What was found in one file. Lengths are {length: rows} for each part."""

    path: Path
    chars: list = field(default_factory=lambda: [Counter(), Counter()])
    tokens: list = field(default_factory=lambda: [Counter(), Counter()])
    num_pairs: int = 0  # learnt responses with their questions, or documents
    with_context: int = 0
    characters: Counter = field(default_factory=Counter)
    rows_seen: array = field(default_factory=lambda: array("Q"))  # a hash of each conversation
    prompts: array = field(default_factory=lambda: array("Q"))
    signatures: Signatures | None = None

    @property
    def rows(self):
        return len(self.rows_seen)

    @property
    def parts(self):
        """The names of what has a length; documents have one."""
        return PARTS if self.chars[1] else ("text",)

    def add(self, items, tokenizer):
        """Count a batch of conversations and documents."""
        for item in items:
            self.rows_seen.append(_number(key_of(item)))
            self.prompts.append(prompt_number(item))
        texts = [item.text for item in items if isinstance(item, Document)]
        conversations = [item for item in items if not isinstance(item, Document)]
        if self.signatures:
            self.signatures.add([*texts, *("\n".join(turn.text for turn in one.turns) for one in conversations)])
        if pairs := [pair for conversation in conversations for pair in exchanges(conversation, Counter())]:
            self._add_pairs(pairs, tokenizer)
        self._add_texts(texts, tokenizer)

    def _add_texts(self, texts, tokenizer):
        self.num_pairs += len(texts)
        self.chars[0].update(map(len, texts))
        for text in texts:
            self.characters.update(text)
        if tokenizer:
            self.tokens[0].update(len(ids) + 1 for ids in tokenizer.encode_batch(texts))

    def _add_pairs(self, pairs, tokenizer):
        prompts, responses, contexts = zip(*pairs, strict=True)
        self.num_pairs += len(pairs)
        for text in (*prompts, *responses):
            self.characters.update(text)
        self.with_context += sum(context is not None for context in contexts)
        for counter, texts in zip(self.chars, (prompts, responses), strict=True):
            counter.update(map(len, texts))
        if tokenizer:
            parts = (prompts, contexts), (responses, [None] * len(responses))
            for counter, part in zip(self.tokens, parts, strict=True):
                counter.update(map(len, encode_questions(*part, tokenizer, NO_LIMIT).ids))


def count_table(inputs: list) -> str:
    """A table with one line per input, one for the total, and one column for each of COLUMNS."""
    total = sum((source.counts for source in inputs), Counter())
    text = texts_here()
    rows = [(Path(source.path).name, source.counts) for source in inputs] + [(text("prepare.total"), total)]
    width = max(cell_len(name) for name, _ in rows)
    shown = [column for column in COLUMNS if column not in RARE or total[column]]
    titles = {column: padded(text(f"column.{column}"), 9, right=True) for column in shown}
    lines = ["  ".join([" " * width, *titles.values()])]
    for name, counts in rows:
        cells = (f"{counts[column]:,}".rjust(cell_len(title)) for column, title in titles.items())
        lines.append("  ".join([padded(name, width), *cells]))
    return "\n".join(lines)


def print_problems(inputs: list) -> None:
    """Print what was left out: to stderr malformed rows and whole files, to stdout what no option asks for."""
    text = texts_here()
    for source in inputs:
        lines = [text("prepare.left_out", problem=problem) for problem in source.problems]
        if (others := source.counts["malformed"] - len(source.problems)) > 0:
            lines.append(text("prepare.more", count=others, path=source.path))
        if count := source.counts[SHORTENED]:
            lines.append(text("prepare.shortened", count=count, path=source.path))
        if source.failure:
            lines.append(text("prepare.whole_file", problem=source.failure))
        for line in lines:
            print(f"prepare_data: {line}", file=sys.stderr)
        if source.ignored:
            print(f"{source.path}: {describe_ignored(source.ignored, lambda name: text(f'ignored.{name}'))}")


def print_written(written: dict[Path, array]) -> None:
    """Print how much is in each output, and how many prompts are distinct or also in the first output."""
    (output, prompts), *others = ((path, np.frombuffer(hashes, np.uint64)) for path, hashes in written.items())
    distinct = np.unique(prompts)
    text = texts_here()
    with open(output, "rb") as file:  # pyarrow itself opens only names in UTF-8
        what = UNITS[pq.read_schema(file).names[0]]
    unit, key = text(f"unit.{what}"), "texts" if what == "texts" else "written"
    print(text(f"prepare.{key}", path=output, unit=unit, count=len(prompts), distinct=len(distinct)))
    for path, hashes in others:
        shared = int(np.isin(hashes, distinct).sum())
        print(text(f"prepare.{key}_too", path=path, unit=unit, count=len(hashes), shared=shared, other=output))


def print_report(paths: list[Path], tokenizer_dir: Path, max_seq_len: int) -> None:
    """Print what is worth knowing of files of pairs, the training file first; draw their lengths beside it.

    Tokens are counted if there is a tokenizer, near duplicates if rensa is installed. Raises ValueError for a tokenizer
    or a file that cannot be read.
    """
    tokenizer = load_tokenizer(tokenizer_dir) if (tokenizer_dir / "tokenizer.json").exists() else None
    can_compare = find_spec("rensa") is not None
    contents = [read_contents(path, tokenizer, can_compare) for path in paths]
    for one in contents:
        print("\n".join(report_lines(one, tokenizer, max_seq_len)))
    for other in contents[1:]:
        print(shared_line(other, contents[0]))
    text = texts_here()
    if not tokenizer:
        print(text("report.no_tokens", folder=tokenizer_dir))
    if not can_compare:
        print(text("report.no_near"))
    picture = paths[0].with_name(f"{paths[0].stem}_lengths.png")
    draw_lengths(contents, max_seq_len, picture)
    print(text("report.drawn", path=picture))


def read_contents(path: Path, tokenizer: ChatTokenizer | None, near: bool) -> Contents:
    """Contents of a file, with signatures if `near`. Raises ValueError for an unreadable file."""
    contents = Contents(path, signatures=Signatures() if near else None)
    items = read_items(path, FileRequest())
    now_doing(texts_here()("report.reading", path=path))
    while batch := list(islice(items, BATCH_ROWS)):
        contents.add(batch, tokenizer)
        advance(len(batch))
    return contents


def report_lines(contents: Contents, tokenizer: ChatTokenizer | None, max_seq_len: int) -> list[str]:
    """What is worth knowing of one file, a line for each fact."""
    text = texts_here()
    found = dict(count=contents.num_pairs, rows=contents.rows, context=contents.with_context)
    kind = "report.pairs" if contents.parts == PARTS else "report.texts"
    lines = [text(kind, path=contents.path, **found)]
    for unit, counters in (("characters", contents.chars), ("tokens", contents.tokens)):
        for part, counter in zip(contents.parts, counters, strict=False):
            if counter:
                what = text(f"report.{part}.{unit}")
                lines.append("  " + text("report.lengths", what=what, percentiles=_percentiles(counter)))
    if tokenizer:
        shares = [
            text(f"report.{part}.cut", share=_above(counter, max_seq_len) / contents.num_pairs)
            for part, counter in zip(contents.parts, contents.tokens, strict=False)
        ]
        lines.append("  " + text("report.cut", most=max_seq_len, shares=text("comma").join(shares)))
        lines.append(f"  {_bytes_line(contents.characters, tokenizer)}")
    num_exact = contents.rows - len(np.unique(np.frombuffer(contents.rows_seen, np.uint64)))
    lines.append("  " + text("report.exact", share=_share(num_exact, contents.rows)))
    return lines + (_near_lines(contents) if contents.signatures else [])


def shared_line(contents: Contents, other: Contents) -> str:
    """How many pairs of one file have a prompt that the other file has too."""
    shared = np.isin(*(np.frombuffer(one.prompts, np.uint64) for one in (contents, other)))
    share = _share(int(shared.sum()), contents.rows)
    return texts_here()("report.shared", path=contents.path, share=share, other=other.path)


def draw_lengths(contents: list[Contents], max_seq_len: int, path: Path) -> None:
    """Write a PNG of the lengths of all parts: of tokens if they were counted, else of characters."""
    from matplotlib.figure import Figure  # takes a second

    unit = "tokens" if contents[0].tokens[0] else "characters"
    figure, parts = Figure(figsize=(10, 4), layout="constrained"), contents[0].parts
    for place, (part, axes) in enumerate(zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True)):
        counters = [getattr(one, _FIELDS[unit])[place] for one in contents]
        edges = np.linspace(0, max(map(max, counters)) + 1, NUM_BARS + 1)  # equal ones for all files
        for one, counter in zip(contents, counters, strict=True):
            shares = np.array(list(counter.values())) / one.num_pairs
            axes.hist(list(counter), bins=edges, weights=shares, alpha=0.6, label=one.path.name)
        if unit == "tokens":
            axes.axvline(max_seq_len, color="tab:red", linestyle=":", label=f"max_seq_len={max_seq_len}")
        axes.set(xlabel=f"{part} [{unit}]", ylabel="share of rows", yscale="log")
        axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    write_file(path, drawn.getvalue())


_FIELDS = dict(tokens="tokens", characters="chars")


def _number(key):
    return int.from_bytes(key[:8])


def _share(part, whole):
    return texts_here()("report.share", part=part, whole=whole, share=part / whole)


def _above(counter, limit):
    return sum(rows for length, rows in counter.items() if length > limit)


def _percentiles(counter):
    """The lengths that so many percent of the rows do not exceed."""
    lengths = np.array(sorted(counter))
    ranks = np.cumsum([counter[length] for length in lengths])
    found = [lengths[np.searchsorted(ranks, np.ceil(percent / 100 * ranks[-1]))] for percent in PERCENTILES]
    return ", ".join(f"p{percent} {length:,}" for percent, length in zip(PERCENTILES, found, strict=True))


def _bytes_line(characters, tokenizer):
    """How many characters the tokenizer splits to bytes, as it has no token for them, and which are the commonest."""
    vocabulary, text = tokenizer.backend.get_vocab(), texts_here()
    if BYTE_TOKENS[0] not in vocabulary:
        return text("report.only_bytes")
    split = Counter({c: count for c, count in characters.items() if c not in vocabulary})
    share = _share(split.total(), characters.total())
    shown = " ".join(f"{c}×{count:,}" for c, count in split.most_common(NUM_SHOWN))
    often = text("report.often", characters=shown) if split else ""
    return text("report.bytes", share=share, count=len(split)) + often


def _near_lines(contents):
    found, partner = contents.signatures.near_duplicates()
    places = np.flatnonzero(found)
    text = texts_here()
    shown = [text("report.two", first=partner[place] + 1, second=place + 1) for place in places[:NUM_SHOWN]]
    rows = text("comma").join([*shown, *["…"] * (len(places) > NUM_SHOWN)])
    lines = ["  " + text("report.near", share=_share(len(places), contents.rows), similarity=SIMILARITY)]
    return lines + (["    " + text("report.rows", rows=rows)] if len(places) else [])
