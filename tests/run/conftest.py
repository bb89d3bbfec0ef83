"""Fixture: saves checkpoints of the tiny model."""

from dataclasses import asdict, replace

import pytest

from model.run.checkpoint import save_checkpoint, snapshot_of
from tests.parts import STATE


@pytest.fixture
def save(tmp_path, model, optimizer):
    return lambda step, keep=5: save_checkpoint(
        tmp_path, replace(STATE, step=step, shape=asdict(model.config)), snapshot_of(model, optimizer), keep
    )
