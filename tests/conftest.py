"""Fixtures: a tokenizer and a token store, made once per session, a model of a few thousand weights, a run's folder."""

import signal

import pytest
import torch

from model.data.tokenizer import load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import export_model
from model.train.optim import make_optimizer
from tests.parts import batch_of, make_config, make_model, make_pairs, open_pairs, write_parquet
from tests.tiny import furnish

signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores Ctrl+C, its children too


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text for pair in make_pairs(300) for text in pair], 507, directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def store(tmp_path_factory, tokenizer):
    """Token store of 60 examples; read only."""
    folder = tmp_path_factory.mktemp("data")
    return open_pairs(write_parquet(folder / "pairs.parquet", make_pairs(60)), tokenizer, 64, folder / "tokens")


@pytest.fixture
def model(tokenizer):
    return make_model(tokenizer.vocab_size)


@pytest.fixture
def optimizer(model, store):
    """AdamW-RMS after one real step."""
    optimizer = make_optimizer(model, make_config(optimizer="adamw_rms"))
    model(batch_of(store, [0, 1])).backward()
    optimizer.update(optimizer.param_groups[0]["lr"], torch.ones(()))
    return optimizer


@pytest.fixture
def exported(model, tokenizer, tmp_path):
    """A Hugging Face directory with the weights of `model`."""
    export_model(model, tokenizer, tmp_path / "best")
    return tmp_path / "best"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with what a tiny run needs (tests/tiny.py)."""
    return furnish(tmp_path_factory.mktemp("home"))
