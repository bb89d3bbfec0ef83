"""The command `plan`: the memory, disk and steps of a run, predicted without its machine."""

import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import ujson
from rich.cells import cell_len

from config import as_type
from model.commands.expected_time import card, expected_text
from model.commands.length_sample import sample_of
from model.commands.network import compute_dtype
from model.commands.options import read_request
from model.commands.origin import find_origin
from model.commands.recipe import (
    answers_wanted,
    launch_tokens_here,
    memory_spec,
    plan_options,
    with_optimizer,
)
from model.commands.run_length import check_warmup, global_batch, run_pairs, steps_between, warmup_pairs
from model.commands.settled import settled
from model.data.length_histogram import Lengths
from model.display.catalogue import Texts, texts_here
from model.display.console import padded
from model.memory.duration import step_seconds
from model.memory.estimate import Estimate, disk_bytes
from model.memory.plan import (
    CHUNKS,
    USABLE,
    NothingFits,
    Room,
    choose_plan,
    fitting_plan,
    phase_problem,
    predicted_peaks,
    recording_asked,
)
from model.memory.step_time import time_factor
from model.runtime.device_memory import CONTEXT_BYTES
from model.runtime.distributed import ALONE
from model.train.lr_schedule import warmup_problem

OWN_OPTIONS = dict(num_processes=int, vocab_size=int, json=bool, gpu=str)
GIB = 2**30
COLLECTIVE_BYTES = 400 * 2**20  # NCCL's buffers on each GPU, if there are several
HOST_BYTES = dict(cuda=int(2.2 * GIB), cpu=int(0.6 * GIB))  # per process: Python, torch, the GPU's libraries
MANY_PAIRS = 10**6
SHM_BYTES = 64 * 2**20  # per rank, for NCCL channels in /dev/shm


@dataclass(frozen=True)
class Machine:
    """The machine that the run is planned for."""

    num_processes: int
    memory_bytes: int | None  # of one GPU, as far as the run may use it; None: no GPU

    @property
    def usable_bytes(self):
        """Bytes left for the allocator after the CUDA context and NCCL's buffers; None without a GPU."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - CONTEXT_BYTES - (COLLECTIVE_BYTES if self.num_processes > 1 else 0)


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
    num_gpus = torch.cuda.device_count()
    world = num_processes or max(num_gpus, 1)
    name, known = card(gpu)
    limit = int((config.gpu_memory_limit_gb or (known.gib if gpu else 0)) * GIB)
    limit = limit or (num_gpus and torch.cuda.get_device_properties(0).total_memory)
    machine = Machine(world, limit or None)
    origin = _origin(config, vocab_size)
    config, why = settled(config, typed, origin)
    model_config, sample = origin.model_config, sample_of(config, origin)
    lengths, num_pairs = sample.lengths, sample.num_pairs
    batch = global_batch(config, world, typed)
    share_pairs = -(-batch // world)
    device = "cpu" if machine.memory_bytes is None else "cuda"
    dtype = _dtype_on(device, config.mixed_precision)
    spec = replace(memory_spec(config, model_config, dtype, device, launch_tokens_here()), num_ranks=world)
    estimate = Estimate(spec, lengths, share_pairs, answers_wanted(config, world))
    num_steps = run_pairs(config, num_pairs or int(lengths.counts.sum()), batch) / batch
    asked = recording_asked(plan_options(config), spec, num_steps)
    plan = choose_plan(plan_options(config), estimate, machine.usable_bytes, asked)
    tokens = min(plan.micro_batch_tokens, share_pairs * lengths.longest)
    steps = _steps(config, typed, batch, num_pairs)
    return dict(
        expected=dict(gpu=name, step_seconds=known and step_seconds(plan, estimate, known), steps=steps["count"]),
        machine=asdict(machine) | dict(usable_bytes=machine.usable_bytes),
        ignored_weights=_ignored_weights(config), model=config.model,
        parameters=spec.parameters, trained=spec.trained, dtype=str(dtype).removeprefix("torch."),
        lengths=dict(
            source=_source_text(sample.source, Texts("en")), origin=sample.source, pairs=int(lengths.counts.sum()),
            mean=lengths.mean, longest=lengths.longest,
        ),
        steps=steps,
        optimizer=dict(name=config.optimizer, learn_rate=config.learn_rate, why=texts_here()(f"why.{why}")),
        share_pairs=share_pairs, fixed_bytes=estimate.fixed,
        bytes_per_token=_bytes_per_token(spec, lengths, plan, tokens), plan=asdict(plan),
        forwards=round(estimate.forwards(tokens), 2), phases=_phases(config, estimate, plan, machine.usable_bytes),
        levers=_levers(config, estimate, machine, plan),
        largest_block=dict(
            pairs=config.batch_size_per_gpu, tokens=config.max_seq_len, vocabulary=model_config.vocab_size,
            bytes=4 * config.batch_size_per_gpu * config.max_seq_len * model_config.vocab_size,
        ),
        host=_host(config, estimate, plan, device, world) | _disk(config, estimate.spec, sample.store_bytes),
    )  # fmt: skip


def _dtype_on(device, mixed_precision):
    """The compute dtype on a CPU, on this machine's GPUs or, where it has none, on another machine's."""
    if device == "cpu" or torch.cuda.device_count():
        return compute_dtype(mixed_precision, torch.device(device))
    return torch.float32 if mixed_precision == "no" else torch.bfloat16


def _bytes_per_token(spec, lengths, plan, tokens):
    """By how much a forward pass of 2 * `tokens` exceeds one of `tokens`; a few pairs would not fill both, many do."""
    many = Lengths(lengths.tokens, lengths.counts * math.ceil(2 * tokens / (lengths.mean * lengths.counts.sum())))
    forward_bytes = Estimate(spec, many, MANY_PAIRS).forward_bytes
    return (forward_bytes(2 * tokens, *plan.cutting[1:]) - forward_bytes(tokens, *plan.cutting[1:])) / tokens


def _origin(config, vocab_size):
    """The Origin of a new run; weights that are not on this machine are ignored, and the tokenizer may be missing."""
    known = replace(config, finetune_from_ckp_file="") if _ignored_weights(config) else config
    return find_origin(ALONE, known, (), vocab_size=vocab_size)


def _ignored_weights(config):
    """Name of the weights that are not on this machine; "" if they are, or if none are named."""
    return "" if Path(config.finetune_from_ckp_file).exists() else config.finetune_from_ckp_file


def _steps(config, typed, batch, num_pairs):
    """Dict of pairs per step, number of steps, warm-up steps and the warm-up's problem; None if `num_pairs` is unknown.

    Raises ValueError if --warmup_steps was `typed` and is not shorter than the run.
    """
    if not num_pairs:
        return dict(pairs=batch, count=config.max_steps or num_pairs, warmup=None, problem="")
    total_pairs = run_pairs(config, num_pairs, batch)
    full_steps = total_pairs / batch
    warmup = warmup_pairs(config, total_pairs, batch) / batch
    check_warmup(config, typed, warmup, full_steps)
    count = steps_between(0, total_pairs, num_pairs, batch)
    return dict(pairs=batch, count=count, warmup=warmup, problem=warmup_problem(config.learn_rate, warmup, full_steps))


def _phases(config, estimate, plan, usable_bytes):
    """Peak bytes by phase, without those that the run has not."""
    has = dict(evaluation=bool(config.validation_file), generation=bool(config.validation_file and config.bleu_pairs))
    return {name: peak for name, peak in predicted_peaks(estimate, plan, usable_bytes).items() if has.get(name, True)}


def _levers(config, chosen, machine, plan):
    """For each change of an option: peak bytes, largest micro-batch that fits, time relative to the chosen plan."""
    if machine.usable_bytes is None:
        return []
    tokens, chunk, checkpointing = plan.cutting
    spec = chosen.spec
    rows = [("chunk", size, spec, (tokens, size, checkpointing)) for size in CHUNKS]
    longest, all_tokens = chosen.lengths.longest, chosen.share_pairs * chosen.lengths.longest
    # train refuses smaller ones, and no step has more tokens
    sizes = [size for size in (tokens // 2, 2 * tokens) if longest <= size <= all_tokens]
    rows += [("micro_batch", size, spec, (size, chunk, checkpointing)) for size in sizes]
    blocks = {False: 0, True: chosen.num_blocks}
    rows += [("checkpointing", on, spec, (tokens, chunk, number)) for on, number in blocks.items()]
    for optimizer in () if spec.lora else ("muon", "adamw_rms", "adafactor"):
        rows.append(("optimizer", optimizer, with_optimizer(spec, optimizer), plan.cutting))
    levers = []
    lengths = chosen.lengths
    for kind, value, changed, cutting in rows:
        estimate = Estimate(changed, lengths, chosen.share_pairs, chosen.answers)
        room = Room(estimate, machine.usable_bytes * USABLE)
        largest, changed_plan = fitting_plan(room, all_tokens, *cutting[1:]), room.plan(*cutting, graphs=plan.graphs)
        phases = _phases(config, estimate, changed_plan, machine.usable_bytes)
        fits = room.holds(*cutting) and not phase_problem(phases, machine.usable_bytes)
        factor = time_factor(plan.cut_as(cutting), chosen) / time_factor(plan, chosen)
        levers.append(
            dict(lever=Texts("en")(f"lever.{kind}", value=value), kind=kind, value=value,
                 peak_bytes=estimate.step_peak(*cutting), fits=fits, time_factor=round(factor, 3),
                 largest_micro_batch_tokens=largest.micro_batch_tokens if largest else 0)
        )  # fmt: skip
    return levers


def _host(config, estimate, plan, device, world):
    """Bytes of host memory and /dev/shm that the run needs, and bytes free in /dev/shm."""
    weights, saved = 4 * estimate.spec.parameters, 4 * estimate.spec.saved
    optimizer_state = estimate.spec.state_bytes
    compute = weights if device == "cuda" else max(estimate.peaks(*plan.cutting, plan.answers).values())
    rank_bytes = HOST_BYTES[device] + compute
    return dict(
        rank_bytes=rank_bytes, main_rank_bytes=rank_bytes + saved + optimizer_state,
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


def table(values):
    """Text of the table that `plan` prints for the values of `preview`."""
    plan, block, host, text = values["plan"], values["largest_block"], values["host"], texts_here()
    limit, lengths = values["machine"]["usable_bytes"], values["lengths"]
    weights, comma = values["ignored_weights"], text("comma")
    parts = comma.join(f"{text(f'part.{name}')} {gib(count)}" for name, count in values["fixed_bytes"].items())
    source = _source_text(lengths["origin"], text)
    lines = [
        *[(text("plan.weights"), text("plan.weights.found", weights=weights, model=values["model"]))] * bool(weights),
        (text("plan.parameters"), text("plan.parameters.found", **_of(values, "parameters trained dtype"))),
        (text("plan.pairs"), text("plan.pairs.found", source=source, **_of(lengths, "pairs mean longest"))),
        (text("plan.steps"), _steps_text(text, **values["steps"])),
        (text("plan.optimizer"), text("plan.optimizer.found", **values["optimizer"])),
        (text("plan.expected"), expected_text(**values["expected"])),
        (text("plan.always"), parts),
        (text("plan.per_token"), f"{values['bytes_per_token'] / 1024:.1f} KiB"),
        (text("plan.card"),
         text("plan.card.none") if limit is None else text("plan.card.found", size=gib(limit), share=USABLE)),
        (text("plan.plan"), text("plan.plan.found", **plan)),
        (text("plan.recorded"), text("plan.recorded.yes" if plan["graphs"] else "plan.recorded.no")),
        (text("plan.forwards"), text("plan.forwards.found", count=values["forwards"], pairs=values["share_pairs"])),
        *((text("plan.peak", phase=text(f"phase.{name}")),
           gib(count) if count <= (limit or math.inf) else text("plan.too_large", size=gib(count)))
          for name, count in values["phases"].items()),
        *[(text("plan.levers"), text("plan.levers.found"))] * bool(values["levers"]),
        *(_lever_line(text, lever) for lever in values["levers"]),
        (text("plan.ordinary"), text("plan.ordinary.found", gib=block["bytes"] / GIB, **block)),
        (text("plan.host"), text("plan.host.found", rank=gib(host["rank_bytes"]), main=gib(host["main_rank_bytes"]))),
        ("/dev/shm", text("plan.free", size=gib(host["shm_bytes"]), free=gib(host["shm_free_bytes"]))),
        (text("plan.disk"), text("plan.free", size=gib(host["disk_bytes"]), free=gib(host["disk_free_bytes"]))),
    ]  # fmt: skip
    width = max(cell_len(name) for name, _ in lines)
    return "\n".join(f"{padded(name, width)}  {found}" for name, found in lines)


def _of(values, names):
    return {name: values[name] for name in names.split()}


def _source_text(source, text):
    """Where the lengths of a Sample come from, in words."""
    kind, values = source
    return text(f"source.{kind}", **values)


def _steps_text(text, pairs, count, warmup, problem):
    if not count:
        return text("plan.steps.unknown", pairs=pairs)
    warm = text("plan.warmup.unknown") if warmup is None else text("plan.warmup", steps=warmup)
    return text("plan.steps.found", count=count, pairs=pairs, warmup=problem or warm)


def _lever_line(text, lever):
    figures = dict(size=gib(lever["peak_bytes"]), factor=lever["time_factor"])
    said = text(
        "plan.lever.fits" if lever["fits"] else "plan.lever.too_large",
        tokens=lever["largest_micro_batch_tokens"], **figures,
    )  # fmt: skip
    return text("plan.with", lever=text(f"lever.{lever['kind']}", value=lever["value"])), said


def gib(count):
    return f"{count / GIB:.2f} GiB"
