import math
from statistics import median

import pytest

from model.data.tokenizer import load_tokenizer
from model.runtime import fault_injection
from model.train.optim import make_optimizer
from model.train.spike_guard import MAX_SKIPPED_STEPS, MIN_NORMS, WINDOW, spike_limit
from model.train.step import Position, train_steps
from tests.parts import PLAN, context_of, make_config, make_model, make_pairs, open_pairs, write_parquet
from tests.ranks import ROOT
from tests.tiny import NUM_PAIRS, furnish, ids_by_epoch, journal, train, weights_hash

GUARD = 1.05  # close to the median, so that an ordinary run has spikes


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of the golden losses: with it, norms of this short run exceed their median."""
    return load_tokenizer(ROOT / "tests" / "golden" / "tokenizer")


@pytest.fixture(scope="module")
def store(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("spikes")
    return open_pairs(write_parquet(folder / "pairs.parquet", make_pairs(60)), tokenizer, 64, folder / "tokens")


def guarded_steps(store, tokenizer, spike_guard=GUARD, recent_norms=(), epochs=7):
    config = make_config(seed=3, optimizer="adamw_rms", learn_rate=0.01, spike_guard=spike_guard)
    model = make_model(tokenizer.vocab_size)
    schedule = dict(total_pairs=len(store) * epochs, global_batch=16)
    context = context_of(model, make_optimizer(model, config), store, config, **schedule)
    return model, train_steps(context, Position(PLAN, recent_norms=recent_norms))


def test_the_limit_is_the_median_times_the_guard_once_enough_norms_are_known():
    norms = tuple(range(1, MIN_NORMS + 1))
    assert spike_limit(norms, 3.0) == 3.0 * median(norms)
    assert spike_limit(norms[1:], 3.0) == spike_limit(norms, 0) == math.inf


def test_a_step_is_skipped_if_and_only_if_its_norm_exceeds_the_limit(store, tokenizer):
    model, steps = guarded_steps(store, tokenizer)
    accepted, skipped, before = [], 0, None
    for result in steps:
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        limit = spike_limit(accepted[-WINDOW:], GUARD)
        if result.skipped:
            skipped += 1
            ((kind, values),) = result.events
            assert (kind, values["step"], sorted(values["ids"])) == ("skip", result.step, sorted(result.ids))
            assert f"{limit:.3g}" in values["why"]
            assert all(weights[name].equal(before[name]) for name in before)
        else:
            assert result.grad_norm <= limit
            accepted.append(float(result.grad_norm))
        assert list(result.position.recent_norms) == accepted[-WINDOW:]
        before = weights
    assert skipped and len(accepted) > MIN_NORMS


def test_without_the_guard_no_step_is_skipped_and_no_norm_is_kept(store, tokenizer):
    results = list(guarded_steps(store, tokenizer, spike_guard=0)[1])
    assert not any(result.skipped or result.position.recent_norms for result in results)


def test_too_many_spikes_in_a_row_end_the_run_with_their_ids_and_the_remedies(store, tokenizer):
    _, steps = guarded_steps(store, tokenizer, recent_norms=(1e-9,) * MIN_NORMS)
    results = []
    with pytest.raises(RuntimeError, match=f"{MAX_SKIPPED_STEPS + 1} steps in a row.*examples.*raise --spike_guard"):
        for result in steps:
            results.append(result.skipped)
    assert results == [True] * (MAX_SKIPPED_STEPS + 1), "the last one is yielded too, before the run ends"


def test_a_last_step_that_is_not_finite_is_not_in_doubt_if_the_steps_before_it_were_spikes(
    store, tokenizer, monkeypatch
):
    last = -(-len(store) // 16)
    assert last <= MAX_SKIPPED_STEPS
    monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults(f"loss:0:{last}:nan:99"))
    _, steps = guarded_steps(store, tokenizer, recent_norms=(1e-9,) * MIN_NORMS, epochs=1)
    assert [(result.skipped, result.in_doubt) for result in steps] == [(True, False)] * last


def test_the_weights_before_too_many_spikes_are_saved_and_all_ranks_wait_for_it_however_slow_the_disk_is(tmp_path):
    home, options = furnish(tmp_path), dict(spike_guard=1.000001, epochs=40, save_steps=1000)
    done = train(home, 2, output_dir="baseline", **options)
    assert done.codes == [1, 1] and "raise --spike_guard" in done.text
    (end,) = (stop["step"] for stop in journal(home / "baseline", "stop"))
    assert (home / "baseline" / "checkpoints" / "LATEST").read_text() == f"step_{end:08d}"
    done = train(home, 2, ",".join([f"save:0:{end}:slow"] * 3), output_dir="slow", **options)
    assert done.codes == [1, 1] and "where each thread" not in done.text, done.text
    assert (home / "slow" / "checkpoints" / "LATEST").read_text() == f"step_{end:08d}"


def test_ranks_that_end_after_steps_that_are_not_finite_wait_for_an_older_save_under_way(tmp_path):
    home, bad = furnish(tmp_path), [f"loss:0:{step}:nan:2" for step in range(8, 19)]
    done = train(home, 2, ",".join(bad + ["save:0:7:slow"] * 3), output_dir="run", epochs=4, save_steps=7)
    assert done.codes == [1, 1] and "where each thread" not in done.text, done.text
    assert (home / "run" / "checkpoints" / "LATEST").read_text() == "step_00000007"


def test_a_killed_and_resumed_run_on_two_ranks_skips_the_same_steps(tmp_path):
    home, options = furnish(tmp_path), dict(spike_guard=1.01, epochs=4, warmup_steps=0, save_steps=5)
    done = train(home, 2, output_dir="baseline", **options)
    assert done.codes == [0, 0], done.text
    skips = journal(home / "baseline", "skip")
    assert skips and all(len(skip["ids"]) in (8, 4) for skip in skips)
    killed_at = skips[0]["step"] + 1
    for fault, keep in ((f"forward:all:{killed_at}:kill", False), ("", True)):
        train(home, 2, fault, output_dir="killed", is_keep_training=keep, **options)
    assert [skip["step"] for skip in journal(home / "killed", "skip")] == [skip["step"] for skip in skips]
    assert weights_hash(home / "killed") == weights_hash(home / "baseline")
    assert ids_by_epoch(home / "killed") == {epoch: list(range(NUM_PAIRS)) for epoch in range(1, 5)}
