"""What a run writes to its journal and its log: the start, the steps, what went wrong."""

import hashlib
import logging
import math
import sys
from dataclasses import asdict
from importlib.metadata import version

import torch

from model.commands.summary import device_name, first_words, unused_lines
from model.display.catalogue import texts_here
from model.display.console import train_line
from model.run.checkpoint import discard_after
from model.run.run_dir import cut_sample_ids_everywhere
from model.runtime.atomic_io import remove_drafts, write_json
from model.runtime.device_memory import peak_memory, reset_peak
from model.runtime.laps import lap, laps, seconds_since_start
from model.train.lr_schedule import warmup_problem

LOGGER = logging.getLogger("chat_trainer")


def begin(run, journal, request, state, plan):
    """Write config.json, plan.json and the start and resume lines; remove what the steps after `state` write again."""
    config, ranks, schedule = run.config, run.ranks, run.schedule
    config_values = asdict(config)
    if ranks.is_main:
        remove_drafts(run.dir, run.dir / "checkpoints")
        discard_after(run.dir, state.step)
        write_json(run.dir / "config.json", dict(preset=request.preset, given=request.given, config=config_values))
        write_json(run.dir / "plan.json", asdict(plan) | run.memory | dict(lengths=binned_lengths(run.train)))
    cut_sample_ids_everywhere(ranks, run.dir, state.step)
    journal.write(
        "start", preset=request.preset, config_hash=hashlib.sha256(repr(config_values).encode()).hexdigest()[:16],
        world=ranks.world_size, backend=ranks.backend, device=device_name(ranks.device),
        dtype=str(run.model.compute_dtype).removeprefix("torch."), versions=versions(),
        tokenizer_fingerprint=run.tokenizer.fingerprint, parameters=sum(p.numel() for p in run.model.parameters()),
        global_batch=schedule.global_batch, total_pairs=schedule.total_pairs, epoch_pairs=run.train.epoch_pairs,
        epochs=schedule.total_pairs / run.train.epoch_pairs if config.max_steps else config.epochs,
        best_metric=config.best_metric,
        total_steps=run.total_steps(state), startup_seconds=seconds_since_start(), startup=laps(),
        optimizer=config.optimizer, learn_rate=config.learn_rate,
        warmup_pairs=schedule.learn_rate.warmup_pairs, memory={k: v for k, v in run.memory.items() if k != "phases"},
    )  # fmt: skip
    reset_peak(ranks.device)
    journal.write(
        "resume", step=state.step, pairs_seen=state.pairs_seen, evaluated_step=state.evaluated_step,
        bits_may_differ=run.differs,
    )  # fmt: skip
    if run.differs:
        differs = " and ".join(run.differs)
        say(ranks, f"changed since the checkpoint: {differs}; bits may differ from step {state.step} on")
    if request.changed:
        say(ranks, f"options changed since the previous start: {', '.join(request.changed)}")
    if ranks.is_main:
        lines = first_words(run, state, plan, config_values) + unused_lines(run, request.typed, config_values)
        for line in lines:
            say(ranks, line)
    warmup_steps, num_steps = (
        pairs / schedule.global_batch for pairs in (schedule.learn_rate.warmup_pairs, schedule.total_pairs)
    )
    say(ranks, warmup_problem(schedule.learn_rate.peak, warmup_steps, num_steps))


def binned_lengths(examples):
    """{side: Lengths.binned of it}, for plots."""
    names, num_sides = examples.objective.sides, examples.histogram.tokens.shape[1]
    if len(names) != num_sides:  # a network may take several columns as one side
        names = [f"side {place}" for place in range(num_sides)]
    return {name.removesuffix("_ids"): examples.histogram.binned(place) for place, name in enumerate(names)}


def write_events(run, journal, samples, result):
    """Journal what went wrong during a step. Write the ids of its examples to `samples`."""
    if "first step" not in laps():
        lap("first step")
    for kind, values in result.events:
        journal.write(kind, **values)
        say(run.ranks, f"{kind}: {event_text(kind, values)}")
    samples.write("sample", step=result.step, epoch=result.epoch, ids=result.ids)


def event_text(kind, values):
    """What went wrong in a step, in words; the journal has the numbers."""
    text = texts_here()
    known = {name: values[name] for name in ("where", "rank", "why") if name in values}
    if "where" in known:
        known["where"] = text.get(f"place.{known['where']}", known["where"])
    if kind == "oom" and values["before"] and values["after"]:
        before, now = (values[name]["micro_batch_tokens"] for name in ("before", "after"))
        said = text("smaller", now=now, before=before, **known) if now < before else text("event.oom", **known)
    else:
        said = text(f"event.{kind}", **known)
    return text("at_step", step=values["step"], said=said)


def log_steps(run, journal, results):
    """Write one train line for `results`, the steps since the previous one; returns its values."""
    peak_bytes, reserved_bytes, host_rss_bytes = peak_memory(run.ranks.device)
    taken = [result for result in results if not result.skipped]
    seconds, tokens = sum(r.step_seconds for r in results), sum(r.tokens for r in results)
    last = results[-1]
    metrics = {name: _mean(taken, place, name) for place, name in enumerate(last.metrics)}
    values = dict(
        step=last.step, epoch=last.epoch, **metrics, learn_rate=last.learn_rate, grad_norm=float(last.grad_norm),
        pairs_seen=last.pairs_seen, target_tokens=sum(r.weights[0] for r in taken), tokens=tokens,
        tokens_per_second=tokens / seconds,
        step_seconds=seconds / len(results), micro_batches=sum(r.micro_batches for r in results) / len(results),
        peak_bytes=peak_bytes, reserved_bytes=reserved_bytes, host_rss_bytes=host_rss_bytes,
        data_wait_seconds=sum(r.data_wait_seconds for r in results) / len(results),
    )  # fmt: skip
    journal.write("train", **values)
    on_gpu = run.ranks.device.type == "cuda"
    say(run.ranks, train_line({k: v for k, v in values.items() if on_gpu or k not in ("peak_bytes", "reserved_bytes")}))
    return values


def _mean(results, place, name):
    """Mean of a metric over steps, NaN over none; `place` is its index among the objective's metrics."""
    weights = [result.weights[place] for result in results]
    total = sum(float(result.metrics[name]) * weight for result, weight in zip(results, weights, strict=True))
    return total / sum(weights) if results else math.nan


def say(ranks, text):
    """Log `text` as one line on the main rank, unless it is empty."""
    if ranks.is_main and text:
        LOGGER.info(text)


def versions():
    python = ".".join(map(str, sys.version_info[:3]))
    libraries = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return dict(python=python, cuda=torch.version.cuda, **libraries)
