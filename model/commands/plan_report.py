"""The command `plan`: the memory, disk and steps of a run, predicted without its machine."""

import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
import ujson

from model.commands.expected_time import card
from model.commands.length_sample import sample_of
from model.commands.levers import Times, levers, phases
from model.commands.machine import machine_here
from model.commands.option_values import as_type
from model.commands.options import read_request
from model.commands.origin import find_origin
from model.commands.plan_table import GIB, source_text, table
from model.commands.recipe import fitted, resolve
from model.commands.run_length import run_pairs, steps_between
from model.data.length_histogram import Lengths
from model.display.catalogue import Texts, texts_here
from model.memory.estimate import Estimate, disk_bytes
from model.memory.plan import (
    NothingFits,
    choose_plan,
    graphs_asked,
    phase_problem,
)
from model.memory.transfers import ASSUMED
from model.runtime.device_memory import CONTEXT_BYTES
from model.runtime.distributed import ALONE
from model.runtime.links import measured_links
from model.train.lr_schedule import warmup_problem

OWN_OPTIONS = dict(num_processes=int, vocab_size=int, json=bool, gpu=str)
COLLECTIVE_BYTES = 400 * 2**20  # NCCL's buffers on each GPU, if there are several
HOST_BYTES = dict(cuda=int(2.2 * GIB), cpu=int(0.6 * GIB))  # per process: Python, torch, the GPU's libraries
MANY_PAIRS = 10**6
SHM_BYTES = 64 * 2**20  # per rank, for NCCL channels in /dev/shm


def plan_text(stray, options):
    """What the command `plan` prints for a command line: a table, or JSON under --json=True.

    Raises ValueError for wrong options. Raises NothingFits if the run does not fit; the values found are printed first.
    """
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    num_processes, vocab_size = (
        as_type(name, own.get(name, 0), OWN_OPTIONS) for name in ("num_processes", "vocab_size")
    )
    for name, value in dict(num_processes=num_processes, vocab_size=vocab_size).items():
        if value < 0:
            raise ValueError(f"--{name}={value}: must be at least 0 (0: as on this machine)")
    as_json = as_type("json", own.get("json", False), OWN_OPTIONS)
    request = read_request(stray, options)
    try:
        values = preview(request.config, request.typed, num_processes, vocab_size, own.get("gpu", ""))
    except NothingFits as error:
        if as_json:
            print(ujson.dumps(dict(fits=False, refused=str(error)), indent=1))
        raise
    problem = phase_problem(values["phases"], values["machine"]["usable_bytes"])
    text = ujson.dumps(dict(fits=not problem, refused=problem) | values, indent=1) if as_json else table(values)
    if problem:
        print(text)
        raise NothingFits(problem)
    return text


def preview(config, typed, num_processes=0, vocab_size=0, gpu=""):
    """What a run of `config` would take, as plain values for `table` and for JSON.

    `typed` holds the names of the options on the command line; 0 processes or tokens, no `gpu`: as on this machine.
    Raises ValueError if the vocabulary size or the GPU is unknown, NothingFits if one example does not fit.
    """
    name, sheet = card(gpu)
    memory_bytes = int((config.gpu_memory_limit_gb or (sheet.gib if gpu else 0)) * GIB) or memory_here()
    machine = machine_here(num_processes or max(torch.cuda.device_count(), 1), "cuda" if memory_bytes else "cpu")
    recipe, sample = planned_recipe(config, typed, machine, vocab_size)
    measured = {} if gpu else measured_links()
    links = replace(ASSUMED, **measured, measured=tuple(measured))
    return dict(ignored_weights=_ignored_weights(config)) | predict(recipe, sample, memory_bytes, name, sheet, links)


def planned_recipe(config, typed, machine, vocab_size=0):
    """(Recipe, Sample of the training pairs) of a new run on a Machine; `vocab_size` as of `preview`."""
    origin = _origin(config, vocab_size)
    recipe = resolve(config, typed, machine, origin)
    sample = sample_of(recipe, origin.tokenizer)
    return resolve(config, typed, machine, origin, sample.num_pairs), sample


def predict(recipe, sample, memory_bytes, gpu="", sheet=None, links=ASSUMED):
    """What a run of this Recipe would take on GPUs of `memory_bytes` each (None: a CPU), as plain values.

    `sample` is a Sample of its examples. With the data sheet of a `gpu` the time is among them, with what is sent over
    Links. Raises NothingFits if one example does not fit.
    """
    machine, lengths = recipe.machine, sample.lengths
    usable = usable_bytes(memory_bytes, machine.num_processes)
    recipe = fitted(recipe, lengths, usable)
    config, spec, estimate = recipe.config, recipe.spec, recipe.estimate(lengths)
    asked = graphs_asked(recipe.plan, spec, _num_steps(recipe, lengths))
    plan = choose_plan(recipe.plan, estimate, usable, asked)
    times = Times(sheet, links, config.reduce_dtype == "bf16")
    tokens = min(plan.micro_batch_tokens, recipe.share_pairs * lengths.longest)
    steps = _steps(recipe, sample.num_pairs)
    return dict(
        expected=dict(gpu=gpu, step_seconds=times.of_step(plan, estimate), steps=steps["count"]),
        machine=dict(num_processes=machine.num_processes, memory_bytes=memory_bytes, usable_bytes=usable),
        model=config.model, parameters=spec.parameters, trained=spec.trained,
        dtype=str(recipe.dtype).removeprefix("torch."),
        lengths=dict(
            source=source_text(sample.source, Texts("en")), origin=sample.source, pairs=int(lengths.counts.sum()),
            mean=lengths.mean, longest=lengths.longest,
        ),
        steps=steps,
        optimizer=dict(
            name=config.optimizer, learn_rate=config.learn_rate, why=texts_here()(f"why.{recipe.why_optimizer}")
        ),
        share_pairs=recipe.share_pairs, fixed_bytes=estimate.fixed,
        bytes_per_token=_bytes_per_token(spec, lengths, plan, tokens), plan=asdict(plan),
        forwards=round(estimate.forwards(tokens), 2), phases=phases(recipe, estimate, plan, usable),
        links=asdict(links), levers=levers(recipe, estimate, usable, plan, times),
        largest_block=_padded_logits(config, recipe.model_config.vocab_size),
        host=_host(recipe, estimate, plan) | _disk(config, spec, sample.store_bytes),
    )  # fmt: skip


def memory_here():
    """Bytes of one of this machine's GPUs; None if it has none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def usable_bytes(memory_bytes, num_processes):
    """Bytes left of a GPU's memory after the CUDA context and NCCL's buffers; None without a GPU."""
    if memory_bytes is None:
        return None
    return memory_bytes - CONTEXT_BYTES - (COLLECTIVE_BYTES if num_processes > 1 else 0)


def _num_steps(recipe, lengths):
    """Steps of the run; where the number of pairs is unknown, of a run on those that were sampled."""
    if recipe.schedule:
        return recipe.num_steps
    return run_pairs(recipe.config, int(lengths.counts.sum()), recipe.global_batch) / recipe.global_batch


def _padded_logits(config, vocab_size):
    """The logits of a whole batch in float32, which a trainer that pads every pair stores."""
    pairs, tokens = config.batch_size_per_gpu, config.max_seq_len
    return dict(pairs=pairs, tokens=tokens, vocabulary=vocab_size, bytes=4 * pairs * tokens * vocab_size)


def _bytes_per_token(spec, lengths, plan, tokens):
    """By how much a forward pass of 2 * `tokens` exceeds one of `tokens`; a few pairs would not fill both, many do."""
    many = Lengths(lengths.tokens, lengths.counts * math.ceil(2 * tokens / (lengths.mean * lengths.counts.sum())))
    forward_bytes = Estimate(spec, many, MANY_PAIRS).forward_bytes
    return (forward_bytes(2 * tokens, *plan.batching[1:]) - forward_bytes(tokens, *plan.batching[1:])) / tokens


def _origin(config, vocab_size):
    """The Origin of a new run; weights that are not on this machine are ignored, and the tokenizer may be missing."""
    known = replace(config, finetune_from_ckp_file="") if _ignored_weights(config) else config
    return find_origin(ALONE, known, (), vocab_size=vocab_size)


def _ignored_weights(config):
    """Name of the weights that are not on this machine; "" if they are, or if none are named."""
    return "" if Path(config.finetune_from_ckp_file).exists() else config.finetune_from_ckp_file


def _steps(recipe, num_pairs):
    """Pairs a step, number of steps, warm-up steps and the warm-up's problem; None if `num_pairs` is unknown."""
    config, batch, schedule = recipe.config, recipe.global_batch, recipe.schedule
    if not schedule:
        return dict(pairs=batch, count=config.max_steps or num_pairs, warmup=None, problem="")
    problem = warmup_problem(config.learn_rate, recipe.warmup_steps, recipe.num_steps)
    count = steps_between(0, schedule.total_pairs, num_pairs, batch)
    return dict(pairs=batch, count=count, warmup=recipe.warmup_steps, problem=problem)


def _host(recipe, estimate, plan):
    """Bytes of host memory and /dev/shm that the run needs, and bytes free in /dev/shm."""
    weights, saved = 4 * estimate.spec.parameters, 4 * estimate.spec.saved
    optimizer_state, device = estimate.spec.state_bytes, recipe.machine.device_type
    world = recipe.machine.num_processes
    compute = weights if device == "cuda" else max(estimate.peaks(*plan.batching, plan.answers).values())
    inputs = estimate.host_bytes(*plan.batching)
    rank_bytes = HOST_BYTES[device] + compute + estimate.spec.offloaded_bytes + inputs
    copied = saved + optimizer_state + estimate.spec.average_bytes
    if estimate.spec.offloads and not estimate.spec.own_part:
        copied = 0  # a save writes what lies in host memory
    return dict(
        rank_bytes=rank_bytes, main_rank_bytes=rank_bytes + copied, input_bytes=inputs,
        shm_bytes=SHM_BYTES * world if device == "cuda" and world > 1 else 0,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0,
    )  # fmt: skip


def _disk(config, spec, store_bytes):
    """Bytes that the run writes to disk, `store_bytes` of tokens among them, and bytes free there."""
    output = Path(config.output_dir).absolute()
    disk = next(path for path in (output, *output.parents) if path.exists())
    return dict(
        disk_bytes=disk_bytes(spec, config.keep_latest_n_ckp) + store_bytes,
        disk_free_bytes=shutil.disk_usage(disk).free,
    )
