"""Steps captured as CUDA graphs; they need a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.data.buckets import Bucket
from model.data.sequences import Sequences, with_places
from model.nn import gradient_parts
from model.nn.base import Packing
from model.nn.loss_terms import LossTerms
from model.nn.t5.batch import collate
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.device_memory import release_memory
from model.train.cuda_graphs import StepGraphs
from model.train.objectives.pairs import Pairs
from model.train.optim import make_optimizer
from tests.parts import farthest, gradients_of, make_config
from tests.tenants.drawn import Drawn

SHAPE = T5ModelConfig(
    d_model=128, d_ff=256, num_heads=2, d_kv=64, num_layers=2, num_decoder_layers=2, vocab_size=500
)  # fmt: skip
BUCKET = Bucket((1024, 1280), 32)


def random_micro_batch(num_pairs, bucket, seed, places=False):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 60, size=(2, num_pairs))
    columns = tuple(draw.integers(1, 500, size=column.sum()) for column in lengths)
    packing = Packing(0, True, bucket, bucket.examples if bucket else 0, dropout=True)
    sequences = Sequences(columns, lengths.T, ids=np.arange(num_pairs))
    return collate(with_places(sequences) if places else sequences, packing)


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_checkpointing", [0, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_recorded_step_gives_the_gradients_of_the_step_itself(gradient_checkpointing, dropout):
    model = TextToTextModel(SHAPE, dropout, torch.bfloat16).initialise(0).to("cuda")
    model.gradient_checkpointing = gradient_checkpointing
    graphs = StepGraphs(model, Pairs(LossTerms(z_loss=1e-4)))
    for seed in range(4):
        model.key_dropout(0, seed)
        model.zero_grad()
        graphs.gradients(random_micro_batch(20 + seed, BUCKET, seed), BUCKET, 512, ((0.25,), (0.25, 0.5)))
        recorded, captured_sums = gradients_of(model), model.flat.sums[:2].clone()
        model.zero_grad()
        loss, parts = model.cross_entropy(random_micro_batch(20 + seed, None, seed).to("cuda"), 512, LossTerms(1e-4))
        (loss * 0.25).backward()
        torch.testing.assert_close(
            captured_sums, parts[:2] * torch.tensor([0.25, 0.5], device="cuda"), rtol=1e-3, atol=0
        )
        assert farthest(recorded, gradients_of(model)) < 1e-2
    assert len(graphs.captured) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["unlikelihood", "scalegrad", "contrastive"])
def test_a_recorded_step_with_teachers_and_against_loops_gives_the_gradients_of_the_step_itself(kind):
    model = TextToTextModel(SHAPE, 0.1, torch.bfloat16).initialise(0).to("cuda")
    teacher = TextToTextModel(replace(SHAPE, d_model=192, d_kv=32), 0.0, torch.bfloat16).initialise(1)
    model.teachers = (teacher.requires_grad_(False).to("cuda").eval(),)
    terms = LossTerms(distill_weight=0.5, against_loops=kind, loops_weight=1.0, loops_ngram=2)
    graphs = StepGraphs(model, Pairs(terms))
    for seed in range(3):
        model.key_dropout(0, seed)
        model.zero_grad()
        graphs.gradients(random_micro_batch(20, BUCKET, seed, places=True), BUCKET, 512, ((0.25,), (0.25,)))
        recorded = gradients_of(model)
        model.zero_grad()
        batch = random_micro_batch(20, None, seed, places=True).to("cuda")
        (model.cross_entropy(batch, 512, terms)[0] * 0.25).backward()
        assert farthest(recorded, gradients_of(model)) < 1e-2
    assert len(graphs.captured) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_checkpointing", [0, 3])
@pytest.mark.parametrize("objective", [Pairs(), Drawn()], ids=["one_forward", "two_forwards"])
def test_a_replay_tells_when_each_part_of_the_gradients_is_written(objective, gradient_checkpointing, monkeypatch):
    monkeypatch.setattr(gradient_parts, "LEAST_NUMBERS", 1)
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    model.gradient_checkpointing = gradient_checkpointing
    graphs, beside = StepGraphs(model, objective, in_parts=True), torch.cuda.Stream()
    scales = (0.25,) * len(objective.metrics), (0.5,) * len(objective.metrics)
    graphs.gradients(random_micro_batch(20, BUCKET, 0), BUCKET, 512, scales)  # records it

    def copies(part):
        flat = model.flat.gradients_and_sums
        return [flat[start:stop].clone() for start, stop in part.ranges]

    for seed in range(6):
        model.zero_grad()
        torch.cuda._sleep(100_000_000)  # cycles: the copies wait before the replay begins, however slow the host is
        graph = graphs.gradients(random_micro_batch(20 + seed, BUCKET, seed), BUCKET, 512, scales)
        (first, end), seen = [torch.cuda.Event(enable_timing=True) for _ in range(2)], []
        end.record()
        with torch.cuda.stream(beside):
            for number, part in enumerate(model.gradient_parts):
                graph.ready[number].wait()
                seen.append(copies(part))
                if len(seen) == 1:
                    first.record()
        torch.cuda.synchronize()
        assert first.elapsed_time(end) > 0, "the first part is there before the replay has ended"
        for part, seen_then in zip(model.gradient_parts, seen, strict=True):
            assert all(torch.equal(then, now) for then, now in zip(seen_then, copies(part), strict=True))
        torch.testing.assert_close(graph.norms, torch.stack([model.flat.sums.norm(), torch.cat(seen[-1]).norm()]))
    assert len(model.gradient_parts) == 4
    with torch.no_grad():
        model.encoder.final_layer_norm.weight[0] = float("inf")
    graph.graph.replay()
    assert graph.norms.isfinite().tolist() == [False, False]


@pytest.mark.gpu
def test_a_forward_that_fits_no_bucket_runs_in_the_memory_of_the_recordings_and_leaves_nothing_there():
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    graphs, gradients, held = StepGraphs(model, Pairs()), [], []

    def add_gradients():
        model(random_micro_batch(20, None, 0).to("cuda"), 512).backward()

    for _ in range(3):
        model.zero_grad()
        graphs.gradients(random_micro_batch(20, BUCKET, 0), BUCKET, 512, ((1.0,), (1.0,)))
        gradients.append({name: x.cpu() for name, x in gradients_of(model).items()})
        model.zero_grad()
        graphs.run(add_gradients)
        gradients.append({name: x.cpu() for name, x in gradients_of(model).items()})
        release_memory()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert all(farthest(gradients[0], one) < 1e-2 for one in gradients)
    assert held[0] == held[1] == held[2]
    graphs.clear()
    release_memory()
    assert torch.cuda.memory_reserved() < held[0][1]


@pytest.mark.gpu
def test_a_pool_that_ran_the_largest_micro_batch_first_hardly_grows_and_is_freed_while_a_replay_runs():
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    buckets = [Bucket((1024 * n, 1280 * n), 32 * n) for n in (64, 96, 128)]  # blocks of 16 MiB and more
    for _ in range(2):
        release_memory()
        graphs, empty = StepGraphs(model, Pairs()), torch.cuda.memory_reserved()
        graphs.reserve(random_micro_batch(300, buckets[-1], 0), 512, ((1.0,), (1.0,)))
        held = torch.cuda.memory_reserved() - empty
        for bucket in buckets:
            model.zero_grad()
            graphs.gradients(random_micro_batch(300, bucket, 0), bucket, 512, ((1.0,), (1.0,)))
        assert torch.cuda.memory_reserved() - empty < 1.1 * held
        graphs.clear()
        release_memory()
        assert torch.cuda.memory_reserved() < empty + held / 2
    torch.cuda.synchronize()  # raises what a replay without its memory would have done


def weights_after_updates(name, is_captured):
    """The weights and the averages or momenta after three updates, the second of which has a scale that is NaN."""
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    optimizer, graphs = make_optimizer(model, make_config(optimizer=name)), StepGraphs(model, Pairs())
    generator = torch.Generator("cuda").manual_seed(0)
    for rate, scale in ((0.01, 0.5), (0.01, float("nan")), (0.02, 0.25)):
        model.flat.gradients.normal_(generator=generator)
        if is_captured:
            graphs.capture_update(optimizer)
        scale = torch.tensor(scale, device="cuda")
        optimizer.update(rate, scale, graphs.update if is_captured else None)
        if scale.isnan():
            optimizer.count_steps()
    state = [x for fields in optimizer.state.values() for x in fields.values()]
    return [model.flat.masters, *state]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["muon", "adamw_rms", "adamw"])
def test_a_recorded_update_gives_the_bits_of_the_update_itself_and_obeys_its_scale(name):
    recorded, itself = weights_after_updates(name, True), weights_after_updates(name, False)
    assert all(torch.equal(one, other) for one, other in zip(recorded, itself, strict=True))
    assert recorded[0].isfinite().all()


class AllocateTooMuch(torch.autograd.Function):
    """Allocates more than any GPU has, in forward or in backward, while a step is captured."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return allocate_too_much(x, where == "forward")

    @staticmethod
    def backward(ctx, grad):
        return allocate_too_much(grad, ctx.where == "backward"), None


def allocate_too_much(x, here):
    if here and torch.cuda.is_current_stream_capturing():
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    return x.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_while_a_step_is_recorded_is_raised_and_leaks_no_memory(where):
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    hidden, graphs, micro_batch = model.hidden, StepGraphs(model, Pairs()), random_micro_batch(20, BUCKET, 0)
    model.hidden = lambda batch: (AllocateTooMuch.apply(hidden(batch)[0], where), batch.labels)
    allocated = []
    for _ in range(3):
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):
            graphs.gradients(micro_batch, BUCKET, 512, ((1.0,), (1.0,)))
        graphs.clear()
        release_memory()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[2]
    model.hidden = hidden
    model.zero_grad()
    graphs.gradients(micro_batch, BUCKET, 512, ((1.0,), (1.0,)))
    recorded = gradients_of(model)
    model.zero_grad()
    model(random_micro_batch(20, None, 0).to("cuda"), 512).backward()
    assert farthest(recorded, gradients_of(model)) < 1e-2
