"""A synthetic corpus with the lengths of ChatLM's pairs: a tokenizer, two parquet files and their token stores.

One character is one token, so the tokenised pairs have exactly the drawn lengths and the vocabulary has VOCAB_SIZE
tokens.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.runs import open_pairs
from model.data.tokenizer import BYTE_TOKENS, PROBE, SPECIAL_TOKENS, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from tests.sizes import VOCAB_SIZE, draw_lengths

MAX_SEQ_LEN = 256  # tokens per side, EOS included
# Han, Han extension A and Hangul: enough characters for one token each
ALPHABET = [*range(0x4E00, 0xA000), *range(0x3400, 0x4DC0), *range(0xAC00, 0xD7A4)]


def draw_ids(count, num_ids, rng):
    """`count` int64 ids below `num_ids`, log-uniform like the ranks of words in a language (Zipf's law)."""
    return np.minimum(num_ids ** rng.random(count), num_ids - 1).astype(np.int64)


def write_corpus(folder, num_pairs, seed=0):
    """Write tokenizer/, train.parquet and valid.parquet into `folder`; returns the store of train.parquet."""
    folder, rng = Path(folder), np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer", VOCAB_SIZE)
    for name, pairs in (("train", num_pairs), ("valid", 64)):
        lengths = draw_lengths(pairs, rng)
        sides = [_texts(lengths[:, side] - 1, rng) for side in (0, 1)]
        pq.write_table(pa.table(dict(zip(("prompt", "response"), sides, strict=True))), folder / f"{name}.parquet")
    return open_corpus(folder)


def open_corpus(folder):
    """Token store of `folder`'s train.parquet, built at the first call where a run in `folder` looks for it."""
    folder = Path(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    return open_pairs(folder / "train.parquet", tokenizer, MAX_SEQ_LEN, folder / "model_save" / "tokens")


def write_tokenizer(directory, vocab_size):
    """Write a tokenizer of `vocab_size` tokens in which each character of the alphabet is one token."""
    train_tokenizer([PROBE] * 4, 420, directory)
    path = Path(directory) / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    tokens = [*SPECIAL_TOKENS, *BYTE_TOKENS, *map(chr, ALPHABET)][:vocab_size]
    assert len(tokens) == vocab_size
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL_TOKENS)]
    state["model"] |= dict(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    path.write_text(json.dumps(state), encoding="utf-8")


def _texts(lengths, rng):
    letters = np.array(ALPHABET[: VOCAB_SIZE - len(SPECIAL_TOKENS) - len(BYTE_TOKENS)], dtype="<u4")
    text = letters[draw_ids(int(lengths.sum(dtype=np.int64)), len(letters), rng)].tobytes().decode("utf-32-le")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
