import math
from dataclasses import asdict

import pytest
import torch

from model.nn.flat_params import FlatParams
from model.nn.t5.batch import collate
from model.run.checkpoint import TrainState, load_optimizer, read_checkpoint, save_checkpoint, snapshot_of
from model.train import optim
from model.train.dry_run import rehearse_update
from model.train.lr_schedule import check_warmup, learn_rate_at, warmup_pairs
from model.train.optim import RMSScaledAdamW, make_optimizer, orthogonal, update
from tests.parts import ALONE, make_config, make_model

OPTIMIZERS = ["adamw_rms", "adamw", "adafactor", "muon"]


def naive_steps(p, grads, rates, decay, betas=(0.9, 0.999), eps=1e-6):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) of one tensor, its step times max(1e-3, RMS of the tensor)."""
    m = v = torch.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        direction = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        scale = max(1e-3, p.square().mean().sqrt().item())
        p = p - rate * decay * p - rate * scale * direction
    return p


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_twenty_steps_are_those_of_the_formula(decay):
    generator = torch.Generator().manual_seed(0)
    shapes, sizes = [(7, 5), (11,), (3, 2), (1,)], [1.0, 1e-5, 30.0, 0.1]
    starts = [size * torch.randn(shape, generator=generator) for shape, size in zip(shapes, sizes, strict=True)]
    grads = [[torch.randn(shape, generator=generator) for _ in range(20)] for shape in shapes]
    rates = [0.01 * (1 + step % 3) for step in range(20)]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = RMSScaledAdamW(FlatParams(params, [], None, torch.float32), torch.tensor(0.0), weight_decay=decay)
    for step, rate in enumerate(rates):
        for p, history in zip(params, grads, strict=True):
            p.grad.copy_(history[step])
        update(optimizer, optimizer.gradients, torch.tensor(rate), torch.tensor(1.0))
    for p, start, history in zip(params, starts, grads, strict=True):
        expected = naive_steps(start, history, rates, decay)
        assert (p - expected).norm() < 1e-4 * (expected - start).norm()


def take_steps(model, optimizer, store, num_steps, rate=0.01):
    for step in range(num_steps):
        micro_batch = collate(store, [step, step + 1], 0, "cpu")
        model.zero_grad()
        (model(micro_batch) / len(micro_batch.labels)).backward()
        update(optimizer, model.flat.gradients, torch.tensor(rate), torch.tensor(1.0))


def make_rehearsed(model, **options):
    """An optimizer whose state exists, as that of a run before its first step."""
    optimizer = make_optimizer(model, make_config(**options))
    rehearse_update(ALONE, model, optimizer)
    return optimizer


def weights_after(store, tokenizer, name, num_steps=3, rate=0.01):
    model = make_model(tokenizer.vocab_size)
    take_steps(model, make_optimizer(model, make_config(optimizer=name)), store, num_steps, rate)
    return model.state_dict()


def saved(folder, model, optimizer, step):
    """What a checkpoint of the two holds when it is read back."""
    state = TrainState(step=step, shape=asdict(model.config))
    return read_checkpoint(save_checkpoint(folder, state, snapshot_of(model, optimizer), keep=2))


@pytest.mark.parametrize("trainable", ["all", "decoder"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_optimizer_goes_on_bit_for_bit(tmp_path, store, tokenizer, name, trainable):
    runs = []
    for _ in range(2):
        model = make_model(tokenizer.vocab_size)
        if trainable == "decoder":
            model.freeze_all_but_decoder()
        runs.append((model, make_rehearsed(model, optimizer=name, weight_decay=0.01)))
    (model, optimizer), (other, resumed) = runs
    take_steps(model, optimizer, store, 4)
    checkpoint = saved(tmp_path, model, optimizer, step=4)
    other.load_state_dict(checkpoint.tensors)
    places = [tensor.data_ptr() for tensor in snapshot_of(other, resumed).optimizer.values()]
    load_optimizer(resumed, other, checkpoint.optimizer)
    assert places == [tensor.data_ptr() for tensor in snapshot_of(other, resumed).optimizer.values()], "held once"
    take_steps(model, optimizer, store, 3)
    take_steps(other, resumed, store, 3)
    for key, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], weight), key


@pytest.mark.parametrize("now", OPTIMIZERS)
@pytest.mark.parametrize("then", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(tmp_path, store, tokenizer, then, now):
    model = make_model(tokenizer.vocab_size)
    optimizer = make_optimizer(model, make_config(optimizer=then))
    take_steps(model, optimizer, store, 1)
    tensors = saved(tmp_path, model, optimizer, step=1).optimizer
    other = make_rehearsed(model, optimizer=now)
    if now == then:
        load_optimizer(other, model, tensors)
    else:
        with pytest.raises(ValueError, match="of another optimizer: keep --optimizer"):
            load_optimizer(other, model, tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_other_weights_is_refused(tmp_path, store, tokenizer, name):
    config = make_config(optimizer=name)
    states = []
    for step, model in enumerate([make_model(tokenizer.vocab_size), make_model(tokenizer.vocab_size)]):
        if step:
            model.freeze_all_but_decoder()
        optimizer = make_optimizer(model, config)
        take_steps(model, optimizer, store, 1)
        states.append((model, saved(tmp_path / str(step), model, optimizer, step=1).optimizer))
    (whole, of_all), (frozen, of_decoder) = states
    for model, tensors in ((whole, of_decoder), (frozen, of_all)):
        with pytest.raises(ValueError, match="keep --trainable"):
            load_optimizer(make_rehearsed(model, optimizer=name), model, tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_learning_rate_that_is_set_is_the_one_used(store, tokenizer, name):
    before = make_model(tokenizer.vocab_size).state_dict()
    moves = []
    for rate in (0.0, 1e-4, 1e-3):
        after = weights_after(store, tokenizer, name, num_steps=1, rate=rate)
        moves.append(sum((after[key] - before[key]).norm().item() ** 2 for key in before) ** 0.5)
    assert moves[0] == 0
    assert moves[2] / moves[1] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss(store, tokenizer, name):
    model = make_model(tokenizer.vocab_size)
    micro_batch = collate(store, [0, 1], 0, "cpu")
    before = model(micro_batch).item()
    take_steps(model, make_optimizer(model, make_config(optimizer=name)), store, 1)
    assert model(micro_batch).item() < before


def test_the_rate_lives_in_a_tensor_that_the_optimizer_reads_at_each_step(model, store):
    micro_batch = collate(store, [0, 1], 0, "cpu")
    for name in OPTIMIZERS:
        optimizer = make_optimizer(model, make_config(optimizer=name))
        rate = optimizer.param_groups[0]["lr"]
        model(micro_batch).backward()
        update(optimizer, model.flat.gradients, torch.tensor(0.125), torch.tensor(1.0))
        assert isinstance(rate, torch.Tensor)
        assert rate.item() == 0.125


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_rate_warms_up_to_the_peak_and_ends_at_zero(schedule):
    config = make_config(lr_schedule=schedule, learn_rate=0.01)

    def rate(pairs):
        return learn_rate_at(pairs, config, 100, 1000)

    assert [rate(pairs) for pairs in (0, 25, 50, 100)] == pytest.approx([0, 0.0025, 0.005, 0.01])
    assert max(rate(pairs) for pairs in range(1001)) == pytest.approx(0.01)
    assert rate(1000) == pytest.approx(0, abs=1e-12)
    assert rate(1500) == pytest.approx(0, abs=1e-12)
    after_peak = [rate(pairs) for pairs in range(100, 1001)]
    assert after_peak == sorted(after_peak, reverse=True)
    assert rate(321) == rate(321)


def test_each_schedule_has_its_shape():
    cosine, wsd = (make_config(lr_schedule=name, learn_rate=0.01) for name in ("cosine", "wsd"))
    assert learn_rate_at(550, cosine, 100, 1000) == pytest.approx(0.005)
    assert learn_rate_at(325, cosine, 100, 1000) == pytest.approx(0.01 * (1 + math.cos(math.pi / 4)) / 2)
    assert [learn_rate_at(p, wsd, 100, 1000) for p in (500, 799, 900, 950)] == pytest.approx(
        [0.01, 0.01, 0.005, 0.0025]
    )
    assert learn_rate_at(0, cosine, 0, 1000) == 0.01


def test_muon_moves_a_matrix_along_its_momentum_with_even_singular_values():
    torch.manual_seed(0)
    for shape in ((24, 8), (8, 24), (16, 16)):
        batch = torch.randn(3, *shape)
        even = orthogonal(batch)
        for one, other in zip(batch, even, strict=True):
            left, _, right = torch.linalg.svd(one, full_matrices=False)
            values = torch.diag(left.T @ other @ right.T)
            assert 0.5 < values.min() and values.max() < 1.5
            torch.testing.assert_close(left @ torch.diag(values) @ right, other, rtol=0, atol=1e-4)


def test_muon_turns_the_same_way_however_many_matrices_it_works_on_together(monkeypatch, store, tokenizer):
    together = weights_after(store, tokenizer, "muon", num_steps=3, rate=1e-2)
    monkeypatch.setattr(optim, "BATCH_NUMBERS", 1)
    alone = weights_after(store, tokenizer, "muon", num_steps=3, rate=1e-2)
    for key in together:
        torch.testing.assert_close(alone[key], together[key], rtol=1e-4, atol=1e-6)


def test_muon_changes_every_weight_by_about_the_rate_times_its_size(model, store):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_steps(model, make_optimizer(model, make_config(optimizer="muon")), store, 1, rate=0.01)
    for name, p in model.named_parameters():
        moved = ((p - before[name]).norm() / before[name].norm().clamp(min=1e-3 * p.numel() ** 0.5)).item()
        assert 5e-4 < moved < 2e-2, (name, moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_of_another_size_is_refused(tmp_path, store, tokenizer, name):
    model = make_model(tokenizer.vocab_size)
    optimizer = make_optimizer(model, make_config(optimizer=name))
    take_steps(model, optimizer, store, 1)
    tensors = saved(tmp_path, model, optimizer, step=1).optimizer
    key = next(key for key, tensor in tensors.items() if key.startswith("shared.weight/") and tensor.ndim)
    with pytest.raises(ValueError, match="does not fit the weights: shared.weight/"):
        load_optimizer(optimizer, model, tensors | {key: tensors[key][:-1]})
    with pytest.raises(ValueError, match="does not fit the weights: shared.weight/"):
        load_optimizer(optimizer, model, {other: tensor for other, tensor in tensors.items() if other != key})


def movement(name, device):
    """How far three updates move the weights, on the CPU; on a GPU nothing after the first may wait for it."""
    model = make_model(100).to(device)
    optimizer, before = make_optimizer(model, make_config(optimizer=name)), model.flat.masters.clone()
    scale, draw = torch.full((), 0.5, device=device), torch.Generator().manual_seed(0)
    for step in range(3):
        for p in model.flat.trained:
            p.grad.copy_(torch.randn(p.shape, generator=draw))
        if step and device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            update(optimizer, model.flat.gradients, 0.01, scale)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return (model.flat.masters - before).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_on_a_gpu_is_that_of_the_cpu_and_waits_for_nothing(name):
    here, there = movement(name, "cpu"), movement(name, "cuda")
    assert (here - there).norm() < (0.05 if name == "muon" else 1e-3) * here.norm(), "Muon turns in bf16 there"


def test_the_warm_up_is_a_tenth_of_the_run_and_at_most_1000_of_its_first_steps_unless_given():
    own, given, none = (make_config(warmup_steps=steps) for steps in (-1, 5, 0))
    assert [warmup_pairs(own, pairs, 64) for pairs in (12_000, 640_000, 10**9)] == [1200, 64_000, 64_000]
    assert (warmup_pairs(given, 12_000, 64), warmup_pairs(none, 12_000, 64)) == (320, 0)


def test_a_warm_up_that_a_run_never_gets_beyond_is_refused_where_it_is_typed():
    config = make_config(learn_rate=0.02)
    check_warmup(config, {"warmup_steps"}, 1000, 5000)
    check_warmup(config, {"epochs"}, 1000, 250)
    with pytest.raises(
        ValueError, match="warm-up of 1000 steps .* the run, 250: .* comes to 0.005 of 0.02 .*_steps=25$"
    ):
        check_warmup(config, {"warmup_steps"}, 1000, 250)
