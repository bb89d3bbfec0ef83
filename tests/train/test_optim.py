from dataclasses import asdict

import pytest
import torch

from model.nn.flat_params import FlatParams
from model.run.checkpoint import TrainState, load_optimizer, read_checkpoint, save_checkpoint, snapshot_of
from model.train import muon
from model.train.adafactor import Adafactor
from model.train.adamw_rms import RMSScaledAdamW
from model.train.dry_run import dry_run_update
from model.train.optim import make_optimizer
from tests.parts import ALONE, batch_of, make_config, make_model

OPTIMIZERS = ["adamw_rms", "adamw", "adafactor", "muon"]


def naive_steps(p, grads, rates, decay, betas=(0.9, 0.999), eps=1e-6):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) for one tensor, with the step times max(1e-3, its RMS)."""
    m = v = torch.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        direction = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        p = p - rate * max(1e-3, p.square().mean().sqrt().item()) * (direction + decay * p)
    return p


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_twenty_steps_of_adamw_rms_are_those_of_the_formula(decay):
    generator = torch.Generator().manual_seed(0)
    shapes, sizes = [(7, 5), (11,), (3, 2), (1,)], [1.0, 1e-5, 30.0, 0.1]
    starts = [size * torch.randn(shape, generator=generator) for shape, size in zip(shapes, sizes, strict=True)]
    grads = [[torch.randn(shape, generator=generator) for _ in range(20)] for shape in shapes]
    rates = [0.01 * (1 + step % 3) for step in range(20)]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    flat = FlatParams(params[1::2], params[::2], [], torch.float32)
    optimizer = RMSScaledAdamW(flat, torch.tensor(0.0), weight_decay=decay)
    for step, rate in enumerate(rates):
        for p, history in zip(params, grads, strict=True):
            p.grad.copy_(history[step])
        optimizer.update(torch.tensor(rate), torch.tensor(1.0))
    for p, start, history in zip(params, starts, grads, strict=True):
        expected = naive_steps(start, history, rates, decay if p.dim() == 2 else 0.0)
        assert (p - expected).norm() < 1e-4 * (expected - start).norm()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_gives_the_bits_of_torch_s(decay, tokenizer):
    ours, theirs = make_model(tokenizer.vocab_size), make_model(tokenizer.vocab_size)
    optimizer = make_optimizer(ours, make_config(optimizer="adamw", weight_decay=decay))
    parts = theirs.flat.trained[: theirs.flat.num_others], theirs.flat.trained[theirs.flat.num_others :]
    groups = [dict(params=part, weight_decay=kept) for part, kept in zip(parts, (0.0, decay), strict=True)]
    other = torch.optim.AdamW(groups, torch.tensor(0.0), fused=True)
    for step in range(4):
        for model in (ours, theirs):
            model.flat.gradients.copy_(torch.randn(len(model.flat.gradients), generator=torch.manual_seed(step)))
        rate, scale = 0.01 * (step + 1), torch.tensor(0.3 + step)
        optimizer.update(rate, scale)
        for group in other.param_groups:
            group["lr"].fill_(rate)
        theirs.flat.gradients.mul_(scale)
        other.step()
    for one, another in zip(ours.flat.trained, theirs.flat.trained, strict=True):
        assert torch.equal(one, another)
        assert optimizer.state[one].keys() == other.state[another].keys()
        for name, value in other.state[another].items():
            assert torch.equal(optimizer.state[one][name], value)


def take_steps(model, optimizer, store, num_steps, rate=0.01):
    for step in range(num_steps):
        micro_batch = batch_of(store, [step, step + 1], 0)
        model.zero_grad()
        (model(micro_batch) / len(micro_batch.labels)).backward()
        optimizer.update(torch.tensor(rate), torch.tensor(1.0))


def make_allocated(model, **options):
    """An optimizer with allocated state, as a run has before its first step."""
    optimizer = make_optimizer(model, make_config(**options))
    dry_run_update(ALONE, model, optimizer)
    return optimizer


def weights_after(store, tokenizer, name, num_steps=3, rate=0.01):
    model = make_model(tokenizer.vocab_size)
    take_steps(model, make_optimizer(model, make_config(optimizer=name)), store, num_steps, rate)
    return model.state_dict()


def saved(folder, model, optimizer, step):
    """The checkpoint of model and optimizer, written and read back."""
    state = TrainState(step=step, shape=asdict(model.config))
    return read_checkpoint(save_checkpoint(folder, state, snapshot_of(model, optimizer), keep=2))


@pytest.mark.parametrize("trainable", ["all", "decoder"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_optimizer_continues_bit_for_bit(tmp_path, store, tokenizer, name, trainable):
    runs = []
    for _ in range(2):
        model = make_model(tokenizer.vocab_size)
        if trainable == "decoder":
            model.freeze_all_but("decoder")
        runs.append((model, make_allocated(model, optimizer=name, weight_decay=0.01)))
    (model, optimizer), (other, resumed) = runs
    take_steps(model, optimizer, store, 4)
    checkpoint = saved(tmp_path, model, optimizer, step=4)
    other.load_state_dict(checkpoint.tensors)
    addresses = [tensor.data_ptr() for tensor in snapshot_of(other, resumed).optimizer.values()]
    load_optimizer(resumed, other, checkpoint.optimizer)
    loaded = [tensor.data_ptr() for tensor in snapshot_of(other, resumed).optimizer.values()]
    assert loaded == addresses, "loaded in place"
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
    other = make_allocated(model, optimizer=now)
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
            model.freeze_all_but("decoder")
        optimizer = make_optimizer(model, config)
        take_steps(model, optimizer, store, 1)
        states.append((model, saved(tmp_path / str(step), model, optimizer, step=1).optimizer))
    (whole, of_all), (frozen, of_decoder) = states
    for model, tensors in ((whole, of_decoder), (frozen, of_all)):
        with pytest.raises(ValueError, match="keep --trainable"):
            load_optimizer(make_allocated(model, optimizer=name), model, tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_size_of_an_update_is_proportional_to_the_learning_rate(store, tokenizer, name):
    before = make_model(tokenizer.vocab_size).state_dict()
    moves = []
    for rate in (0.0, 1e-4, 1e-3):
        after = weights_after(store, tokenizer, name, num_steps=1, rate=rate)
        moves.append(sum((after[key] - before[key]).norm().item() ** 2 for key in before) ** 0.5)
    assert moves[0] == 0
    assert moves[2] / moves[1] == pytest.approx(10, rel=0.01)


def test_the_learning_rate_is_a_tensor_that_update_writes(model, store):
    for name in OPTIMIZERS:
        optimizer = make_optimizer(model, make_config(optimizer=name))
        rate = optimizer.param_groups[0]["lr"]
        model(batch_of(store, [0, 1], 0)).backward()
        optimizer.update(torch.tensor(0.125), torch.tensor(1.0))
        assert rate.item() == 0.125


def test_muon_gives_the_same_update_whatever_the_size_of_its_batches(monkeypatch, store, tokenizer):
    batched = weights_after(store, tokenizer, "muon", num_steps=3, rate=1e-2)
    monkeypatch.setattr(muon, "BATCH_NUMBERS", 1)
    one_by_one = weights_after(store, tokenizer, "muon", num_steps=3, rate=1e-2)
    for key in batched:
        torch.testing.assert_close(one_by_one[key], batched[key], rtol=1e-4, atol=1e-6)


def test_muons_weight_decay_is_moonlights_at_the_learning_rate_times_the_rms_of_a_matrix(store, tokenizer):
    models, rate, decay = [make_model(tokenizer.vocab_size) for _ in range(2)], 0.02, 0.3
    before = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    for model, chosen in zip(models, (0.0, decay), strict=True):
        take_steps(model, make_optimizer(model, make_config(optimizer="muon", weight_decay=chosen)), store, 1, rate)
    plain, decayed = (dict(model.named_parameters()) for model in models)
    matrices = {id(p) for p in models[0].flat.trained[models[0].flat.num_others :]}
    assert matrices
    for name, start in before.items():
        shrunk = rate * start.square().mean().sqrt() * decay * start if id(plain[name]) in matrices else 0 * start
        torch.testing.assert_close(plain[name] - decayed[name], shrunk, rtol=1e-3, atol=1e-7)


def test_muon_changes_every_tensor_by_about_the_learning_rate_times_its_norm(model, store):
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
    """Change of the weights, on the CPU, after three updates; on a GPU no update after the first may wait for it."""
    model = make_model(100).to(device)
    optimizer, before = make_optimizer(model, make_config(optimizer=name)), model.flat.masters.clone()
    scale, draw = torch.full((), 0.5, device=device), torch.Generator().manual_seed(0)
    for step in range(3):
        for p in model.flat.trained:
            p.grad.copy_(torch.randn(p.shape, generator=draw))
        if step and device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.update(0.01, scale)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return (model.flat.masters - before).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_on_a_gpu_equals_that_on_the_cpu_and_does_not_wait_for_the_device(name):
    on_cpu, on_gpu = movement(name, "cpu"), movement(name, "cuda")
    assert (on_cpu - on_gpu).norm() < (0.05 if name == "muon" else 1e-3) * on_cpu.norm(), "Muon uses bf16 on a GPU"


def naive_adafactor(p, grads, rates, decay):
    """Adafactor (Shazeer and Stern 2018, algorithms 4 and 5) for one tensor."""
    rows = columns = squares = 0.0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        kept = 1 - t**-0.8
        squares = kept * squares + (1 - kept) * g**2
        if g.dim() == 2:
            rows = kept * rows + (1 - kept) * (g**2).mean(1)
            columns = kept * columns + (1 - kept) * (g**2).mean(0)
        direction = g / (torch.outer(rows, columns) / rows.mean() if g.dim() == 2 else squares).sqrt()
        direction /= max(1.0, direction.square().mean().sqrt().item())
        p = p - rate * max(1e-3, p.square().mean().sqrt().item()) * (direction + decay * p)
    return p


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_twenty_steps_of_adafactor_are_those_of_the_formula(decay):
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 5), (11,), (11,), (3, 2), (4, 6), (4, 6), (6, 4)]  # adjacent tensors of one shape are one batch
    starts = [10.0 ** -(i % 4) * torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)]
    grads = [[torch.randn(shape, generator=generator) for _ in range(20)] for shape in shapes]
    rates = [0.01 * (1 + step % 3) for step in range(20)]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = Adafactor(FlatParams(params[:4], params[4:], [params[0]], torch.float32), torch.tensor(0.0), decay)
    assert len(optimizer.batches) == 5
    for step, rate in enumerate(rates):
        for p, history in zip(params, grads, strict=True):
            p.grad.copy_(4 * history[step])
        optimizer.update(torch.tensor(rate), torch.tensor(0.25))
    for number, (p, start, history) in enumerate(zip(params, starts, grads, strict=True)):
        expected = naive_adafactor(start, history, rates, decay if number >= 4 else 0.0)
        assert (p - expected).norm() < 1e-4 * (expected - start).norm()


def test_adafactor_equals_torch_s_at_learning_rates_that_torch_does_not_lower():
    start, grads = torch.randn(12, 8), [torch.randn(12, 8) for _ in range(9)]
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = Adafactor(FlatParams([], [ours], [], torch.float32), torch.tensor(0.0))
    reference = torch.optim.Adafactor([theirs], 0.1)
    for grad in grads:
        ours.grad.copy_(grad)
        optimizer.update(torch.tensor(0.1), torch.tensor(1.0))
        theirs.grad = grad
        reference.step()
    assert (ours - theirs).norm() < 1e-5 * (theirs - start).norm()


def test_adafactor_does_not_change_a_row_without_gradients():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = Adafactor(FlatParams([], [weight], [], torch.float32), torch.tensor(0.0))
    for step in range(3):
        weight.grad.copy_(torch.tensor([[1.0, 2.0], [0.0, 0.0], [float(step), 0.0]]))
        optimizer.update(torch.tensor(0.1), torch.tensor(1.0))
    assert weight.isfinite().all() and (weight[1] == 1).all() and (weight[0] < 1).all()
