"""What is known about the training pairs before they are tokenised: lengths and numbers, from a sample."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from model.commands.objective import on_rows
from model.commands.run_data import source_of
from model.commands.run_files import train_files
from model.data.compressed import CODECS
from model.data.length_histogram import Lengths, histogram
from model.data.sampler import Mixture, mixture_of
from model.data.store_writer import column_lengths, taken_rows, texts_in
from model.data.t5_text import Context
from model.data.token_store import find_store
from model.run.run_dir import TOKENS_DIR
from model.train.examples import Examples

SAMPLED_ROWS, MOST_SHARES = 20_000, 20  # rows in all; of more files, each gives one of so many shares
MOST_ROWS, LEAST_SHARE = 100_000, 20  # but all files together not more rows than the first, unless so few of each are
SAMPLED_CHARS = 4 << 20  # of long texts, from a file
TIMES_SMALLER = 10  # text with .gz or .zst, at most; more is repetition
TOKEN_BYTES = 2.4  # per token in a token store, with its share of lengths and offsets


@dataclass(frozen=True)
class Sample:
    """What is known about the training pairs."""

    lengths: Lengths
    source: tuple[str, dict]  # where the lengths come from: a key after source. in the catalogue and its values
    num_pairs: int | None  # of an epoch; None: unknown
    store_bytes: int  # of the token store that the run will write


def sample_of(recipe, tokenizer):
    """Sample of the training pairs: all if they are tokenised, else the first rows, else max_seq_len for every pair."""
    files = train_files(recipe.config)
    source, weights = source_of(recipe, tokenizer, files), [file.weight for file in files]
    longest = _longest_rows(recipe, source.objective, files)
    if tokenizer is None or not all(Path(path).is_file() for path in source.paths):
        return Sample(Lengths(longest, np.full(len(longest), SAMPLED_ROWS)), ("assumed", {}), None, 0)
    store = find_store(source, TOKENS_DIR)
    if store:
        mixture = mixture_of(store.rows_of_files, weights)
        examples = Examples(store, on_rows(source.objective, store.rows_of_files), None, 0, mixture=mixture)
        return Sample(examples.histogram, ("counted", dict(place=str(store.directory))), examples.epoch_pairs, 0)
    parts = [_first_rows(source, place) for place in range(len(files))]
    counts = [len(part.lengths) for part in parts]
    lengths = on_rows(source.objective, counts).length_bounds(np.concatenate([part.lengths for part in parts]))
    tokens = np.split(lengths.sum(axis=1, dtype=np.int64), np.cumsum(counts)[:-1])
    store_bytes = sum(int(each.sum() * TOKEN_BYTES * part.scale) for each, part in zip(tokens, parts, strict=True))
    is_all = all(part.is_all for part in parts)
    pairs = sum((mixture_of(counts, weights) or Mixture((), tuple(counts))).taken) if is_all else None
    found = "sampled", dict(count=sum(counts))
    return Sample(histogram(np.concatenate([lengths, longest])), found, pairs, store_bytes)


def _longest_rows(recipe, objective, files):
    """Lengths of the longest row that each file may have, (files, columns)."""
    tokens = [recipe.objectives[file.objective].row_tokens(recipe.config.max_seq_len) for file in files]
    rows = np.repeat(np.array(tokens)[:, None], len(objective.columns), axis=1)
    return np.unique(on_rows(objective, [1] * len(files)).length_bounds(rows), axis=0)


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a file, encoded."""

    lengths: np.ndarray  # (rows, columns) as in a store
    is_all: bool  # whether the file has no others
    scale: float  # how many times as many it has


def _first_rows(source, place):
    """The FirstRows of the file at this place of a Source."""
    path, most = source.paths[place], rows_of_each(len(source.paths))
    reader = source.readers[place] if source.readers else source.objective
    rows = reader.read(path, source.columns, Counter())
    taken = taken_rows(rows, most, SAMPLED_CHARS)
    lengths = column_lengths(reader.encode(taken, source.tokenizer, source.max_seq_len))
    is_all = not taken or next(rows, None) is None
    return FirstRows(lengths, is_all, 1.0 if is_all else _estimated_pairs(Path(path), taken) / len(taken))


def rows_of_each(num_files):
    """Most rows that each of so many files gives."""
    return min(SAMPLED_ROWS // min(num_files, MOST_SHARES), max(MOST_ROWS // num_files, LEAST_SHARE))


def _estimated_pairs(path, rows):
    """Number of pairs in a file that begins with `rows`: exact for a parquet of pairs, else an estimate."""
    if path.suffix == ".parquet":
        with open(path, "rb") as file:  # pyarrow itself opens only names in UTF-8
            num_conversations = pq.ParquetFile(file).metadata.num_rows
        return num_conversations * len(rows) / max(sum(map(_begins, rows)), 1)
    text_bytes = sum(len(text.encode(errors="replace")) for row in rows for text in texts_in(row))
    file_bytes = path.stat().st_size * (TIMES_SMALLER if path.suffix.lower() in CODECS else 1)
    return len(rows) * file_bytes / max(text_bytes, 1)


def _begins(row):
    """Whether a row of an objective is the first of its conversation, as far as is known."""
    return not (isinstance(row[-1], Context) and row[-1].end)
