"""Fixtures: a file of pairs, and its token store."""

import pytest

from tests.parts import make_pairs, open_pairs, write_parquet


@pytest.fixture
def source(tmp_path):
    return write_parquet(tmp_path / "pairs.parquet", make_pairs(30, seed=7))


@pytest.fixture
def open_it(source, tokenizer, tmp_path):
    """Open the store of `source`; `.built` counts the batches of pairs that were tokenised."""

    def open_(max_seq_len=64, **options):
        return open_pairs(source, tokenizer, max_seq_len, tmp_path / "tokens", progress=open_.built.append, **options)

    open_.built = []
    return open_
