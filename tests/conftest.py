"""Fixtures: a tokenizer trained once a session, a store of its tokens, a model of a few thousand weights."""

import pytest

from model.dataset import open_store
from model.tokenizer import load_tokenizer, train_tokenizer
from tests.parts import make_model, make_pairs, write_parquet


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text for pair in make_pairs(300) for text in pair], 400, directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def store(tmp_path_factory, tokenizer):
    """Token store of 60 examples; nobody writes to it."""
    folder = tmp_path_factory.mktemp("data")
    return open_store(write_parquet(folder / "pairs.parquet", make_pairs(60)), tokenizer, 64, folder / "tokens")


@pytest.fixture
def model(tokenizer):
    return make_model(tokenizer.vocab_size)
