from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.commands.run_events import log_steps
from model.nn.loss import linear_cross_entropy, token_log_probs
from model.nn.loss_terms import LossTerms
from model.run.journal import Journal, read_journal
from model.train.optim import make_optimizer
from tests.parts import ALONE, PLAN, batch_of, make_config, make_model, steps_of

TOKENS, WIDTH, VOCABULARY = 37, 16, 101


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that any operation inside gives, backward included."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        floats = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dtype == torch.float32]
        self.numel = max(self.numel, *(t.numel() for t in floats), 0)
        return out


def random_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain_loss(hidden, weight, labels, z_loss=0.0, smoothing=0.0):
    return sum(plain_parts(hidden, weight, labels, z_loss, smoothing))


def plain_parts(hidden, weight, labels, z_loss, smoothing):
    logits = hidden.float() @ weight.T
    nll, smooth = (F.cross_entropy(logits, labels, reduction="sum", label_smoothing=x) for x in (0.0, smoothing))
    return nll, z_loss * logits.logsumexp(1).square().sum(), smooth - nll


@pytest.mark.parametrize("z_loss, smoothing", [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (1e-2, 0.3)])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 36, 37, 64, 2048])
def test_loss_and_gradients_are_those_of_pytorch_for_every_chunk_size(chunk_tokens, z_loss, smoothing):
    ours, reference = random_inputs(), random_inputs()
    loss, parts = linear_cross_entropy(*ours, chunk_tokens, LossTerms(z_loss, smoothing))
    expected = plain_loss(*reference, z_loss, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    plain = torch.stack(plain_parts(*reference, z_loss, smoothing)).detach()
    torch.testing.assert_close(parts, plain, rtol=2e-6, atol=1e-6 * expected.item())
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    for mine, theirs in zip(ours[:2], reference[:2], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_bf16_stays_near_float32():
    ours, reference = random_inputs(torch.bfloat16), random_inputs()
    loss, expected = linear_cross_entropy(*ours, chunk_tokens=8)[0], plain_loss(*reference)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    loss.backward()
    expected.backward()
    assert ours[1].grad.dtype == torch.float32
    for mine, theirs in zip(ours[:2], reference[:2], strict=True):
        assert (mine.grad.float() - theirs.grad).norm() < 2e-2 * theirs.grad.norm()


def test_large_logits_do_not_overflow():
    hidden, weight, labels = random_inputs()
    loss, _ = linear_cross_entropy(hidden * 1e4, weight, labels)
    assert loss.isfinite()
    torch.testing.assert_close(loss, plain_loss(hidden * 1e4, weight, labels))


@pytest.mark.parametrize("wants_hidden, wants_weight", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed_are_computed(wants_hidden, wants_weight):
    hidden, weight, labels = random_inputs()
    hidden.requires_grad_(wants_hidden)
    weight.requires_grad_(wants_weight)
    with torch.profiler.profile() as profile:
        loss, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=64)
    products = sum(event.name in ("aten::mm", "aten::addmm_") for event in profile.events())
    assert products == 1 + wants_hidden + wants_weight
    if wants_hidden or wants_weight:
        loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == (wants_hidden, wants_weight)


def train_line_of_a_step(store, tokenizer, folder, **options):
    config, model = make_config(seed=3, logging_steps=1, **options), make_model(tokenizer.vocab_size)
    schedule = dict(total_pairs=len(store), global_batch=16)
    result = next(steps_of(model, make_optimizer(model, config), store, PLAN, config, **schedule))
    with Journal(folder / "metrics.jsonl") as journal:
        log_steps(SimpleNamespace(config=config, ranks=ALONE), journal, [result])
    return read_journal(folder / "metrics.jsonl")[-1]


def test_the_journal_has_plain_cross_entropy_as_its_loss_and_z_loss_separately(store, tokenizer, tmp_path):
    options = {}, dict(z_loss=0.01), dict(label_smoothing=0.1)
    plain, both, smooth = (train_line_of_a_step(store, tokenizer, tmp_path, **chosen) for chosen in options)
    assert smooth["loss"] == both["loss"] == plain["loss"] and "z_loss" not in plain
    assert smooth["grad_norm"] != plain["grad_norm"]
    assert 0.1 < both["z_loss"] < 1, "0.01 times the square of log(400)"


@pytest.mark.parametrize("gradient_checkpointing", [0, 3])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_promise_5_no_step_holds_an_fp32_tensor_of_batch_by_length_by_vocabulary(
    store, tokenizer, compute_dtype, gradient_checkpointing
):
    model = make_model(tokenizer.vocab_size, compute_dtype=compute_dtype)
    config = make_config(global_batch_size=len(store), z_loss=1e-4, label_smoothing=0.1)
    plan = dict(micro_batch_tokens=10**6, chunk_tokens=64, gradient_checkpointing=gradient_checkpointing)
    plan = type(PLAN)(**plan, predicted_peak_bytes=0)
    schedule = dict(total_pairs=len(store), global_batch=len(store))
    steps = steps_of(model, make_optimizer(model, config), store, plan, config, **schedule)
    with LargestFloat32() as largest:
        result = next(steps)
    assert result.micro_batches == 1
    assert result.weights[0] > 10 * plan.chunk_tokens
    assert 0 < largest.numel < result.weights[0] * tokenizer.vocab_size / 4


def test_a_plain_cross_entropy_would_break_promise_5(store, tokenizer, model):
    micro_batch = batch_of(store, range(len(store)), tokenizer.pad_id)
    with LargestFloat32() as largest:
        plain_loss(model.hidden(micro_batch)[0], model.shared.weight, micro_batch.labels).backward()
    assert largest.numel >= len(micro_batch.labels) * tokenizer.vocab_size


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
def test_token_log_probs_and_their_gradients_are_those_of_log_softmax(chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (50, 30))
    labels, factors = torch.randint(30, (50,), generator=generator), torch.randn(50, generator=generator)
    labels[[3, 49]] = -1
    ours = token_log_probs(hidden, weight, labels, chunk_tokens)
    known = labels >= 0
    theirs = (hidden @ weight.T).log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0] * known
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, expected in zip(
        torch.autograd.grad((ours * factors).sum(), (hidden, weight)),
        torch.autograd.grad((theirs * factors).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert not ours[~known].any()


def test_token_log_probs_hold_the_logits_of_one_chunk_at_a_time():
    hidden, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    with LargestFloat32() as largest:
        token_log_probs(hidden, weight, torch.zeros(4096, dtype=torch.int64), 128).sum().backward()
    assert 0 < largest.numel < 4096 * 300 / 4


@pytest.mark.parametrize("z_loss, smoothing", [(0.0, 0.0), (0.01, 0.1)])
def test_labels_below_zero_count_nothing(z_loss, smoothing):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (90, 30))
    labels = torch.randint(30, (90,), generator=generator)
    labels[::3] = -1
    outcomes = []
    for rows in (torch.arange(90), (labels >= 0).nonzero()[:, 0]):
        loss, parts = linear_cross_entropy(hidden[rows], weight, labels[rows], 40, LossTerms(z_loss, smoothing))
        outcomes.append((loss.detach(), parts, *torch.autograd.grad(loss, (hidden, weight))))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)
