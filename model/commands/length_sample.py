"""What is known about the training pairs before they are tokenised: lengths and numbers, from a sample."""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from model.commands.run_data import source_of
from model.data.compressed import CODECS
from model.data.conversation import Turn
from model.data.file_list import data_files
from model.data.length_histogram import Lengths, histogram
from model.data.sampler import Mixture, mixture_of
from model.data.store_writer import column_lengths
from model.data.t5_text import Context
from model.data.token_store import find_store
from model.run.run_dir import TOKENS_DIR
from model.train.examples import Examples

SAMPLED_ROWS, MOST_SHARES = 20_000, 20  # rows in all; of more files, each gives one of so many shares
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
    files, objective, max_seq_len = data_files(recipe.config.train_file), recipe.objective, recipe.config.max_seq_len
    source, weights = source_of(recipe, tokenizer, files), [file.weight for file in files]
    paths, columns = source.paths, source.columns
    longest = objective.length_bounds(np.full((1, len(objective.columns)), max_seq_len))
    if tokenizer is None or not all(Path(path).is_file() for path in paths):
        return Sample(Lengths(longest, np.array([SAMPLED_ROWS])), ("assumed", {}), None, 0)
    store = find_store(source, TOKENS_DIR)
    if store:
        mixture = mixture_of(store.rows_of_files, weights)
        examples = Examples(store, objective, None, 0, mixture=mixture)
        return Sample(examples.histogram, ("counted", dict(place=str(store.directory))), examples.epoch_pairs, 0)
    most = SAMPLED_ROWS // min(len(paths), MOST_SHARES)
    rows = [list(islice(objective.read(path, columns, Counter()), most)) for path in paths]
    encoded = (objective.encode(some, tokenizer, max_seq_len) for some in rows)
    lengths = [objective.length_bounds(column_lengths(part)) for part in encoded]
    num_sampled, is_all = sum(map(len, lengths)), all(len(some) < most for some in rows)
    scales = [
        _estimated_pairs(Path(path), some) / len(some) if len(some) == most else 1
        for path, some in zip(paths, rows, strict=True)
    ]
    store_bytes = sum(int(part.sum() * TOKEN_BYTES * scale) for part, scale in zip(lengths, scales, strict=True))
    counts = [len(part) for part in lengths]
    pairs = sum((mixture_of(counts, weights) or Mixture((), tuple(counts))).taken) if is_all else None
    source = "sampled", dict(count=num_sampled)
    return Sample(histogram(np.concatenate([*lengths, longest])), source, pairs, store_bytes)


def _estimated_pairs(path, rows):
    """Number of pairs in a file that begins with `rows`: exact for a parquet of pairs, else an estimate."""
    if path.suffix == ".parquet":
        with open(path, "rb") as file:  # pyarrow itself opens only names in UTF-8
            num_conversations = pq.ParquetFile(file).metadata.num_rows
        return num_conversations * len(rows) / sum(map(_begins, rows))
    text_bytes = sum(len(text.encode(errors="replace")) for row in rows for text in _texts(row))
    file_bytes = path.stat().st_size * (TIMES_SMALLER if path.suffix.lower() in CODECS else 1)
    return len(rows) * file_bytes / max(text_bytes, 1)


def _begins(row):
    """Whether a row of an objective is the first of its conversation, as far as is known."""
    return not (isinstance(row[-1], Context) and row[-1].end)


def _texts(row):
    """The texts of a row of an objective: its own, and those of turns."""
    for value in row:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (turn.text for turn in value if isinstance(turn, Turn))
