"""Twenty losses of a fixed run, z-loss included. They change only with the mathematics, in a commit that says why."""

from pathlib import Path

import pytest

from model.data.tokenizer import load_tokenizer
from model.train.optim import make_optimizer
from tests.parts import PLAN, make_config, make_model, make_pairs, open_pairs, steps_of, write_parquet

GOLDEN = Path(__file__).parent / "golden" / "losses.txt"
NUM_STEPS = 20


def losses_of(store, tokenizer):
    config = make_config(seed=3, optimizer="adamw_rms", learn_rate=0.02, weight_decay=1.0, z_loss=1e-4)
    model = make_model(tokenizer.vocab_size)
    schedule = dict(total_pairs=len(store) * 6, global_batch=16, warmup_pairs=48)
    steps = steps_of(model, make_optimizer(model, config), store, PLAN, config, **schedule)
    return [sum(result.metrics.values()).item() for result, _ in zip(steps, range(NUM_STEPS), strict=False)]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """(TokenStore, tokenizer) with a tokenizer from before tokens were reserved: it stays valid."""
    folder, tokenizer = tmp_path_factory.mktemp("golden"), load_tokenizer(GOLDEN.parent / "tokenizer")
    return open_pairs(
        write_parquet(folder / "pairs.parquet", make_pairs(60)), tokenizer, 64, folder / "tokens"
    ), tokenizer


def test_the_losses_of_a_fixed_run_are_the_golden_ones(older):
    golden = [float(line) for line in GOLDEN.read_text().splitlines()]
    assert len(golden) == NUM_STEPS
    assert losses_of(*older) == pytest.approx(golden, rel=1e-4)
