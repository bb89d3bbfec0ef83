"""Masters and optimizer state that ranks share: the update, its transaction, the way to and from a checkpoint."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model.nn import gradient_parts
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.weight_parts import equal_ends, share, whole_ends
from model.run import snapshot
from model.run.saver import checksum
from model.run.snapshot import Snapshot, deal, gather, make_buffer, snapshot_of
from model.runtime import fault_injection
from model.runtime.distributed import ALONE, agree, start_ranks, stop_ranks
from model.train import reduction
from model.train.commit import reduce_and_update
from model.train.gradients import Attempt, Outcome
from model.train.optim import make_optimizer
from tests.nn.decoder.test_network import LENGTHS, SIZES, sequences_of
from tests.parts import batch_of, make_config, make_model
from tests.ranks import run_ranks

STEPS = 3


def updated(ranks, model, optimizer, config, step):
    """The UpdateResult of a step whose gradients are drawn by it and by three shares, which the ranks divide."""
    flat, work = model.flat, SimpleNamespace(step=step, learn_rate=0.1)
    shares = [torch.randn(flat.gradients.shape, generator=torch.manual_seed(8 * step + share)) for share in range(3)]
    if config.master_dtype == "bf16":  # only the order of additions tells ranks apart: with one share there is none
        shares[1:] = [torch.zeros_like(share) for share in shares[1:]]
    flat.gradients.zero_()
    own = sum(shares[ranks.rank :: ranks.world_size]).to(ranks.device).split(flat.trained_sizes)
    for p, part in zip(flat.trained, own, strict=True):
        p.grad.copy_(part[: p.numel()].view(p.shape))
    context = SimpleNamespace(ranks=ranks, model=model, optimizer=optimizer, options=config, graphs=None)
    return reduce_and_update(context, Attempt(Outcome.OK), work, math.inf)


def gathered(ranks, model, optimizer):
    """Snapshot of what ranks share on rank 0, an empty one elsewhere."""
    source = snapshot_of(model, optimizer)
    whole = Snapshot(*({key: torch.zeros(t.shape) for key, t in x.items()} for x in (source.weights, source.optimizer)))
    gather(ranks, model, optimizer, whole if ranks.is_main else None, make_buffer(model))
    return whole


def distance(one, other):
    """The relative distance of two dicts of tensors."""
    assert one.keys() == other.keys()
    pairs = [(one[key].float().cpu(), other[key].float().cpu()) for key in one]
    return max(float((a - b).norm() / a.norm().clamp(min=1e-6)) for a, b in pairs)


def problems(ranks, name, dtype, reduce_dtype, master_dtype="float32", offload="none"):
    """Yield what differs between ranks that share an optimizer's state and one rank alone, update by update."""
    options = dict(optimizer=name, reduce_dtype=reduce_dtype, master_dtype=master_dtype, weight_decay=0.1)
    config, whole_config = make_config(share_state="True", offload=offload, **options), make_config(**options)
    place, near = (ranks.rank, ranks.world_size), 1e-5 if reduce_dtype == "float32" else 2e-2
    near = 0.05 if name == "muon" and ranks.device.type == "cuda" else near  # its kernels multiply in bf16
    one, many, again = (make_model(100, compute_dtype=dtype).to(ranks.device) for _ in range(3))
    alone, shared, resumed = (
        make_optimizer(one, whole_config),
        *(make_optimizer(m, config, place) for m in (many, again)),
    )
    for step in range(1, STEPS + 1):
        norms = [
            float(updated(*args, config, step).grad_norm)
            for args in ((replace(ALONE, device=ranks.device), one, alone), (ranks, many, shared))
        ]
        whole, expected = gathered(ranks, many, shared), snapshot_of(one, alone)
        if abs(norms[0] - norms[1]) > near * norms[0]:
            yield f"the norms of step {step} are {norms}"
        if ranks.is_main and distance(expected.weights, whole.weights) > near * (master_dtype == "float32"):
            yield f"the masters after step {step} are others"
        if ranks.is_main and distance(expected.optimizer, whole.optimizer) > near:
            yield f"the state after step {step} is another"
        used = {name: p.copy if p.dtype == dtype else p for name, p in many.named_parameters()}
        if ranks.is_main and any(not p.cpu().equal(whole.weights[name].to(p.dtype)) for name, p in used.items()):
            yield f"the weights after step {step} are not those of the masters"
        agree(ranks, "weights", [checksum(many), norms[1]])
    deal(ranks, again, resumed, whole)
    reduction.publish(ranks, again.flat)
    resumed.count_steps()
    for model, optimizer in ((many, shared), (again, resumed)):
        updated(ranks, model, optimizer, config, STEPS + 1)
    if checksum(many) != checksum(again) or not torch.equal(many.flat.masters, again.flat.masters):
        yield "ranks that were dealt a state go on in another way"
    fault_injection._faults = fault_injection.parse_faults(f"update:last:{STEPS + 2}:oom")
    if updated(ranks, many, shared, config, STEPS + 2).torn != (ranks.rank == ranks.world_size - 1):
        yield "another rank than the one out of memory is torn"
    parts = [sum(t.nbytes for t in fields.values() if t.ndim) for fields in shared.state.values()]
    if sum(parts) > 0.7 * sum(t.nbytes for fields in alone.state.values() for t in fields.values()):
        yield "a rank holds most of the state"


def share_an_update(backend, *settings):
    ranks = start_ranks(backend, 60)
    for setting in settings:
        if setting == settings[-1]:
            gradient_parts.LEAST_NUMBERS, reduction.PIECE_NUMBERS, snapshot.PIECE_NUMBERS = 1, 3000, 3000  # in pieces
            reduction._buffers.cache_clear()
        for problem in problems(ranks, *setting):
            print(setting, problem)
            return 3
    stop_ranks()
    return 0


SETTINGS = [(name, dtype, "float32") for name in ("adamw", "muon") for dtype in (torch.float32, torch.bfloat16)]
SETTINGS += [("adamw", torch.bfloat16, "float32", "bf16"), ("adamw", torch.float32, "float32", "float32", "optimizer")]
SETTINGS += [("adamw", torch.bfloat16, "float32", masters, "optimizer") for masters in ("float32", "bf16")]
SETTINGS += [("muon", torch.float32, "bf16"), ("muon", torch.bfloat16, "float32")]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_state_update_gather_and_deal_it_as_one_rank_and_none_waits_for_one_out_of_memory(
    tmp_path, world
):
    done = run_ranks(world, share_an_update, "gloo", *SETTINGS, folder=tmp_path)
    assert done.codes == [0] * world, done.text


@pytest.mark.parametrize("family", ["t5", "qwen3"])
def test_weights_in_bf16_get_the_bits_of_the_gradients_that_float32_masters_get(store, tokenizer, family):
    model, batch = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16), batch_of(store, range(8))
    if family == "qwen3":
        model = DecoderModel(DecoderModelConfig(**SIZES), compute_dtype=torch.bfloat16).initialise(1)
        batch = collate(sequences_of(LENGTHS, 0), Packing(0))
    found = []
    for is_shared in (False, True):
        if is_shared:
            share(model.flat, equal_ends(model.flat.trained_sizes, 2), 0)
        for loss in (model.cross_entropy(batch)[0], model.token_log_probs(batch).sum()):
            model.zero_grad()
            loss.backward()
            found.append(model.flat.gradients.clone())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and found[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_share_state_update_gather_and_deal_it_as_one_gpu(tmp_path):
    done = run_ranks(2, share_an_update, "nccl", *SETTINGS, folder=tmp_path)
    assert done.codes == [0, 0], done.text


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 40])
def test_parts_cover_all_tensors_in_equal_numbers_or_as_whole_ones(num_ranks):
    sizes = [6400, 32, 32, 1024, 1024, 2048]
    stops = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    equal, whole = equal_ends(sizes, num_ranks), whole_ends(sizes, num_ranks)
    for ends in (equal, whole):
        assert ends == sorted(ends) and len(ends) == num_ranks and ends[-1] == sum(sizes)
    assert set(whole) <= set(stops)
    assert max(b - a for a, b in zip([0, *equal], equal, strict=False)) <= sum(sizes) / num_ranks + 64
