"""Fuzz target of a run's checkpoints: damaged files, and changed values with matching hashes."""

import functools
import hashlib
import json
import math
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from model.commands.option_values import load_config
from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import LoadedWeights, export_model, load_into
from model.memory.oom_policy import PlanRecovery, recovery_of
from model.memory.plan import MemoryPlan
from model.nn.registry import config_from, family_of
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.run.checkpoint import TrainState, load_optimizer, read_checkpoint, save_checkpoint, snapshot_of
from model.train.optim import make_optimizer
from model.train.step import Position, train_steps
from tests.fuzz.mutations import mutate, mutate_tree
from tests.parts import context_of, open_pairs
from tests.tiny import SHAPE

WHOLE = MemoryPlan(10**4, 128, 0, 0)


@functools.cache
def tiny_run():
    """(directory with a tiny run's checkpoint and exports, its model, its optimizer); made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz_parts_"))
    train_tokenizer([PROBE], 507, folder / "tokenizer")
    tokenizer = load_tokenizer(folder / "tokenizer")
    model = TextToTextModel(T5ModelConfig(**SHAPE, vocab_size=tokenizer.vocab_size)).initialise(0)
    optimizer = make_optimizer(model, load_config("pretrain", {}))
    plan = MemoryPlan(200, 64, 0, 10**6)
    state = TrainState(
        step=3, pairs_seen=9, shape=asdict(model.config), best_loss=1.5, plan=asdict(plan),
        growth=asdict(PlanRecovery(replace(plan, chunk_tokens=128), 7, 200)), recent_norms=(1.0, 0.5, 2.0) * 6,
    )  # fmt: skip
    save_checkpoint(folder / "run", state, snapshot_of(model, optimizer), keep=2)
    export_model(model, tokenizer, folder / "exported")
    torch.save(model.state_dict(), folder / "weights.bin")
    return folder, model, optimizer


def check_checkpoint(draw, folder):
    parts, model, _ = tiny_run()
    original, path = parts / "run/checkpoints/step_00000003", folder / "step_00000003"
    shutil.copytree(original, path)
    victim = draw.choice(sorted(path.iterdir()))
    change = draw.randrange(10)
    if change >= 5:  # the hash in the manifest is changed too
        check_changed_state(draw, path)
        return
    if change == 0:
        victim.unlink()
    elif change == 1:
        victim.unlink()
        victim.symlink_to(original / victim.name)
    elif change == 2 and victim.suffix == ".json":
        victim.write_text(json.dumps(mutate_tree(draw, json.loads(victim.read_text()))))
    else:
        victim.write_bytes(mutate(draw, victim.read_bytes()))
    found = read_checkpoint(path)
    assert not victim.is_symlink(), "a link was followed"
    assert found.state == read_checkpoint(original).state
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.tensors.items())


def check_changed_state(draw, path):
    """Change values in a checkpoint's state.json: it must be read as written, and a step must run from it."""
    file, manifest = path / "state.json", json.loads((path / "manifest.json").read_text())
    values = json.loads(file.read_text())
    if draw.random() < 0.4:  # replace one integer by another
        node = draw.choice((values, values["plan"], values["growth"], values["growth"]["full"]))
        node[draw.choice([name for name in node if type(node[name]) is int])] = draw.randrange(4000)
    else:
        part = draw.choice((None, None, "plan", "growth", "recent_norms"))
        changed = mutate_tree(draw, values[part] if part else values)
        values = values | {part: changed} if part else changed
    file.write_text(json.dumps(values))
    manifest["state.json"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    found = read_checkpoint(path)
    values.pop("format", None)
    expected = asdict(TrainState()) | values  # an older format has no values for some fields
    assert asdict(found.state) == expected | dict(recent_norms=tuple(expected["recent_norms"]))
    plan = MemoryPlan(**found.state.plan) if found.state.plan else WHOLE
    plan = replace(plan, graphs=False)  # a CPU has no CUDA graphs
    losses = [_step_after(found, *batching) for batching in ((plan, found.state.growth), (WHOLE, None))]
    assert math.isclose(*losses, rel_tol=1e-5)


def _step_after(found, plan, growth):
    """Loss of the next step after a checkpoint, in a run of two epochs of a few pairs; 0 if there is none."""
    store, state, config = _store(), found.state, load_config("pretrain", dict(spike_guard=3.0))
    model_config = config_from(state.shape)
    model = family_of(model_config).build(model_config)
    load_into(model, LoadedWeights(found.tensors), found.path)
    optimizer = make_optimizer(model, config)
    load_optimizer(optimizer, model, found.optimizer)
    schedule = dict(total_pairs=2 * len(store), global_batch=4, warmup_pairs=100 * state.first_batch)
    context = context_of(model, optimizer, store, config, **schedule)
    position = Position(plan, state.step, state.pairs_seen, recovery_of(growth, plan), state.recent_norms)
    steps = train_steps(context, position)
    result = next(steps, None)
    assert result is None or result.skipped or math.isfinite(result.loss)
    return float(result.loss) if result and not result.skipped else 0.0


@functools.cache
def _store():
    folder, *_ = tiny_run()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(dict(prompt=PROBE[i], response="b")) for i in range(12)))
    return open_pairs(folder / "pairs.jsonl", load_tokenizer(folder / "tokenizer"), 32, folder / "tokens")
