from dataclasses import replace

import numpy as np
import pytest
import torch

from model.data.sampler import step_at
from model.memory.plan import MemoryPlan, NothingFits
from model.runtime import fault_injection
from model.train.adamw_rms import RMSScaledAdamW
from model.train.loader import Loader
from model.train.optim import make_optimizer
from model.train.spike_guard import MAX_SKIPPED_STEPS
from model.train.step import Position, train_steps
from tests.parts import PLAN, SHAPE, batch_of, context_of, farthest, gradients_of, make_config, make_model, steps_of
from tests.tiny import SHAPE as TINY

BATCH = 16
WHOLE = MemoryPlan(10**6, 10**4, 0, 0)


def start(store, tokenizer, plan=PLAN, fault="", monkeypatch=None, epochs=1, trainable="all", shape=SHAPE, **options):
    """(model, generator of its training steps)."""
    if monkeypatch:
        monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults(fault))
    config = make_config(seed=3, optimizer="adamw_rms", learn_rate=0.01, **options)
    model = make_model(tokenizer.vocab_size, shape=shape, dropout=config.dropout)
    if trainable == "decoder":
        model.freeze_all_but("decoder")
    schedule = dict(total_pairs=len(store) * epochs, global_batch=BATCH)
    return model, steps_of(model, make_optimizer(model, config), store, plan, config, **schedule)


def run(*args, num_steps=3, **options):
    """(weights, results) after `num_steps` steps."""
    model, steps = start(*args, **options)
    results = [result for result, _ in zip(steps, range(num_steps), strict=False)]
    return {name: weight.clone() for name, weight in model.state_dict().items()}, results


def same_bits(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


PLANS = {
    "merged into one": WHOLE,
    "packed": PLAN,
    "small": replace(PLAN, micro_batch_tokens=130),
    "one example each": replace(PLAN, micro_batch_tokens=1),
    "small chunks": replace(WHOLE, chunk_tokens=7),
    "checkpointed": replace(WHOLE, gradient_checkpointing=4),
}


@pytest.mark.parametrize("trainable, dropout", [("all", 0.0), ("decoder", 0.0), ("all", 0.2)])
@pytest.mark.parametrize("name", PLANS)
def test_promise_2_any_plan_gives_the_same_gradient(store, tokenizer, name, trainable, dropout):
    gradients = []
    for plan in (WHOLE, PLANS[name]):
        model, steps = start(store, tokenizer, plan, trainable=trainable, dropout=dropout)
        result = next(steps)
        gradients.append(gradients_of(model))
        assert result.loss.item() == pytest.approx(np.log(tokenizer.vocab_size), abs=1)
    if name == "one example each":
        assert result.micro_batches == BATCH
    assert farthest(*gradients) <= 1e-5


def test_the_gradient_is_that_of_the_mean_loss_per_target_token(store, tokenizer):
    model, steps = start(store, tokenizer)
    result = next(steps)
    from_step = gradients_of(model)
    other = make_model(tokenizer.vocab_size)
    ids = step_at(0, len(store), BATCH, 3).ids
    total = sum(loss_of(other, store, i, tokenizer) for i in ids) / store.lengths[ids, 1].sum()
    total.backward()
    assert farthest(from_step, gradients_of(other)) <= 1e-5
    assert result.loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert result.grad_norm.item() == pytest.approx(norm_of(from_step), rel=1e-5)


def loss_of(model, store, i, tokenizer):
    return model(batch_of(store, [i], tokenizer.pad_id))


def norm_of(gradients):
    return sum(gradient.square().sum().item() for gradient in gradients.values()) ** 0.5


def test_steps_cover_each_example_once_per_epoch_and_report_their_position(store, tokenizer):
    _, results = run(store, tokenizer, epochs=2, num_steps=100)
    assert [result.step for result in results] == list(range(1, 9))
    assert [len(result.ids) for result in results] == [16, 16, 16, 12] * 2
    for epoch in (1, 2):
        ids = [i for result in results for i in result.ids if result.epoch == epoch]
        assert sorted(ids) == list(range(len(store)))
    assert [result.ends_epoch for result in results] == [False, False, False, True] * 2
    assert results[-1].pairs_seen == 2 * len(store)
    assert sum(result.tokens for result in results) == 2 * store.lengths.sum()
    assert sum(result.weights[0] for result in results) == 2 * store.lengths[:, 1].sum()
    assert results[-1].loss < results[0].loss
    assert not any(result.skipped or result.events or result.stop for result in results)


def test_the_same_run_gives_the_same_bits(store, tokenizer):
    assert same_bits(run(store, tokenizer)[0], run(store, tokenizer)[0])
    dropped = [run(store, tokenizer, dropout=0.1)[0] for _ in range(2)]
    assert same_bits(*dropped)
    assert not same_bits(dropped[0], run(store, tokenizer)[0])


def test_each_step_has_masks_of_its_own(store, tokenizer):
    model, steps = start(store, tokenizer, dropout=0.1, epochs=2)
    keys = [(next(steps), model.step_key.tolist())[1] for _ in range(8)]
    assert len(set(map(tuple, keys))) == 8


def test_clipping_bounds_the_gradient_and_reports_the_norm_before_it(store, tokenizer):
    free, clipped = (start(store, tokenizer, max_grad_norm=norm) for norm in (0, 0.01))
    results = [next(steps) for _, steps in (free, clipped)]
    assert norm_of(gradients_of(free[0])) == pytest.approx(results[0].grad_norm.item(), rel=1e-5)
    assert norm_of(gradients_of(clipped[0])) == pytest.approx(0.01, rel=1e-3)
    assert torch.equal(results[0].grad_norm, results[1].grad_norm)


@pytest.mark.parametrize(
    "site, kind",
    [("forward", kind) for kind in ("oom", "cublas", "cudnn", "nccl", "cpu")]
    + [(site, "oom") for site in ("backward_first", "backward", "reduce")],
)
def test_a_step_that_runs_out_of_memory_once_is_repeated_bit_for_bit(store, tokenizer, monkeypatch, site, kind):
    expected, _ = run(store, tokenizer, dropout=0.1)
    weights, results = run(store, tokenizer, fault=f"{site}:0:2:{kind}", monkeypatch=monkeypatch, dropout=0.1)
    assert same_bits(weights, expected)
    assert [len(result.events) for result in results] == [0, 1, 0]
    ((name, values),) = results[1].events
    assert name == "oom"
    assert (values["step"], values["rank"], values["before"], values["after"]) == (2, 0, vars(PLAN), vars(PLAN))
    assert results[-1].plan == PLAN


def test_a_step_that_runs_out_of_memory_again_is_repeated_with_smaller_plans(store, tokenizer, monkeypatch):
    expected, _ = run(store, tokenizer, num_steps=1)
    weights, (result,) = run(store, tokenizer, fault="backward:0:1:oom:3", monkeypatch=monkeypatch, num_steps=1)
    assert [name for name, _ in result.events] == ["oom"] * 3
    assert result.plan.micro_batch_tokens < PLAN.micro_batch_tokens
    assert len(result.ids) == BATCH
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_promise_4_a_step_that_shrinks_the_plan_keeps_its_gradient_and_the_losses_of_the_next_200(
    store, tokenizer, monkeypatch
):
    step, more, plan = 5, 200, replace(WHOLE, micro_batch_tokens=2000)
    runs = []
    for fault in ("", f"reduce:0:{step}:oom:2"):
        model, steps = start(store, tokenizer, plan, fault, monkeypatch, epochs=60, shape=TINY)
        results = [next(steps) for _ in range(step)]
        gradients = gradients_of(model)
        runs.append((gradients, results + [next(steps) for _ in range(more)]))
    (expected_gradients, baseline), (gradients, replanned) = runs
    assert farthest(gradients, expected_gradients) <= 1e-5
    assert baseline[step - 1].micro_batches == 1 and replanned[step - 1].micro_batches > 1
    assert {result.plan.micro_batch_tokens for result in replanned[step - 1 : -1]} == {1000}
    for expected, result in zip(baseline, replanned, strict=True):
        assert (result.step, result.ids, result.learn_rate) == (expected.step, expected.ids, expected.learn_rate)
        assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)
    assert baseline[-1].loss < 0.8 * baseline[0].loss
    assert any(not torch.equal(one.loss, other.loss) for one, other in zip(baseline, replanned, strict=True))


def test_out_of_memory_with_the_smallest_plan_raises_nothing_fits(store, tokenizer, monkeypatch):
    with pytest.raises(NothingFits, match="smallest plan .*--max_seq_len.*--is_keep_training=True") as ended:
        run(store, tokenizer, fault="forward:0:1:oom:1000", monkeypatch=monkeypatch)
    longest = int(store.lengths.sum(axis=1, dtype=int).max())
    assert ended.value.plan.micro_batch_tokens == longest < 2 * store.meta["source"]["max_seq_len"]
    assert ended.value.plan.gradient_checkpointing


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_out_of_memory_while_the_next_step_is_packed_is_retried_by_the_attempt(store, tokenizer, monkeypatch, message):
    expected, _ = run(store, tokenizer)
    pack, failures = Loader.pack, [RuntimeError(message)]

    def pack_or_fail(self, work, plan):
        if failures and work.step == 2:
            raise failures.pop()
        return pack(self, work, plan)

    monkeypatch.setattr(Loader, "pack", pack_or_fail)
    weights, _ = run(store, tokenizer)
    assert not failures and same_bits(weights, expected)


def test_an_error_other_than_out_of_memory_is_raised(store, tokenizer, monkeypatch):
    with pytest.raises(OSError, match="Input/output error"):
        run(store, tokenizer, fault="forward:0:1:eio", monkeypatch=monkeypatch)


def test_a_step_whose_loss_is_not_finite_once_is_repeated(store, tokenizer, monkeypatch):
    expected, _ = run(store, tokenizer)
    weights, results = run(store, tokenizer, fault="loss:0:2:nan", monkeypatch=monkeypatch)
    assert same_bits(weights, expected)
    assert [result.skipped for result in results] == [False] * 3
    assert results[1].events == (("not_finite", dict(step=2, rank=0)),)


def test_an_update_that_is_queued_before_its_check_is_read_changes_nothing_if_the_check_fails(
    store, tokenizer, monkeypatch
):
    apply = RMSScaledAdamW.apply

    def apply_obeying_scale(optimizer, scale):
        if scale > 0:
            apply(optimizer, scale)

    expected, _ = run(store, tokenizer)
    monkeypatch.setattr(RMSScaledAdamW, "obeys_scale", True)
    monkeypatch.setattr(RMSScaledAdamW, "apply", apply_obeying_scale)
    weights, results = run(store, tokenizer, fault="loss:0:2:nan", monkeypatch=monkeypatch)
    assert same_bits(weights, expected)
    assert results[1].events == (("not_finite", dict(step=2, rank=0)),)


def test_a_step_whose_loss_is_not_finite_twice_is_skipped_and_the_weights_are_unchanged(store, tokenizer, monkeypatch):
    model, steps = start(store, tokenizer, WHOLE, fault="loss:0:2:nan:2", monkeypatch=monkeypatch)
    next(steps)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    skipped = next(steps)
    assert same_bits(model.state_dict(), before)
    assert skipped.skipped
    assert skipped.loss.isnan() and skipped.grad_norm.isnan()
    assert (skipped.step, skipped.pairs_seen) == (2, 2 * BATCH)
    after = next(steps)
    assert not after.skipped
    assert after.loss.isfinite()
    assert not same_bits(model.state_dict(), before)


def test_a_step_of_finite_loss_whose_gradient_overflows_is_skipped(store, tokenizer):
    model, steps = start(store, tokenizer)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.fill_(1e38)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert next(steps).skipped
    assert same_bits(model.state_dict(), before)


def test_a_run_goes_on_after_the_allowed_number_of_skipped_steps_and_ends_after_one_more(store, tokenizer, monkeypatch):
    def faulty(num_steps):
        return ",".join(f"loss:0:{step}:nan:2" for step in range(1, num_steps + 1))

    allowed = MAX_SKIPPED_STEPS
    _, results = run(
        store, tokenizer, WHOLE, fault=faulty(allowed), monkeypatch=monkeypatch, epochs=4, num_steps=allowed + 1
    )
    assert [result.skipped for result in results] == [True] * allowed + [False]
    with pytest.raises(RuntimeError, match=f"{allowed + 1} steps in a row .* Lower --learn_rate \\(now 0.01\\)"):
        run(store, tokenizer, WHOLE, fault=faulty(allowed + 1), monkeypatch=monkeypatch, epochs=4, num_steps=20)


def test_steps_resumed_at_any_position_equal_those_of_the_whole_run(store, tokenizer):
    _, results = run(store, tokenizer, epochs=2, num_steps=100)
    config = make_config(seed=3, optimizer="adamw_rms", learn_rate=0.01)
    model = make_model(tokenizer.vocab_size)
    schedule = dict(total_pairs=2 * len(store), global_batch=BATCH)
    context = context_of(model, make_optimizer(model, config), store, config, **schedule)
    steps = train_steps(context, Position(PLAN, step=5, pairs_seen=76))
    for resumed, whole in zip(steps, results[5:], strict=True):
        assert (resumed.step, resumed.ids, resumed.learn_rate) == (whole.step, whole.ids, whole.learn_rate)
