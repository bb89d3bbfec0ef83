"""When a run writes to its journal and says to its log: at the start, after steps, when something went wrong."""

import hashlib
import logging
from dataclasses import asdict

from model.commands.summary import first_words, unused_lines
from model.display.catalogue import texts_here
from model.display.console import event_line, train_line
from model.run.checkpoint import discard_after
from model.run.run_dir import cut_sample_ids_everywhere
from model.run.train_line import train_values
from model.runtime.atomic_io import remove_drafts, write_json
from model.runtime.device_memory import peak_memory, reset_peak
from model.runtime.laps import lap, laps, seconds_since_start
from model.runtime.versions import device_name, versions
from model.train.lr_schedule import warmup_problem

LOGGER = logging.getLogger("chat_trainer")


def begin(run, journal, request, state, plan):
    """Write config.json, plan.json and the start and resume lines; remove what the steps after `state` write again."""
    ranks, schedule, options = run.ranks, run.schedule, asdict(run.config)
    if ranks.is_main:
        remove_drafts(run.dir, run.dir / "checkpoints")
        discard_after(run.dir, state.step)
        write_json(run.dir / "config.json", dict(preset=request.preset, given=request.given, config=options))
        write_json(run.dir / "plan.json", asdict(plan) | run.memory | dict(lengths=run.train.binned_lengths))
    cut_sample_ids_everywhere(ranks, run.dir, state.step)
    journal.write(
        "start", preset=request.preset, config_hash=hashlib.sha256(repr(options).encode()).hexdigest()[:16],
        world=ranks.world_size, backend=ranks.backend, device=device_name(ranks.device),
        dtype=str(run.model.compute_dtype).removeprefix("torch."), versions=versions(),
        tokenizer_fingerprint=run.tokenizer.fingerprint, parameters=sum(p.numel() for p in run.model.parameters()),
        global_batch=schedule.global_batch, total_pairs=schedule.total_pairs, epoch_pairs=run.train.epoch_pairs,
        epochs=schedule.total_pairs / run.train.epoch_pairs if options["max_steps"] else options["epochs"],
        best_metric=options["best_metric"],
        total_steps=run.total_steps(state), startup_seconds=seconds_since_start(), startup=laps(),
        optimizer=options["optimizer"], learn_rate=options["learn_rate"],
        warmup_pairs=schedule.learn_rate.warmup_pairs, memory={k: v for k, v in run.memory.items() if k != "phases"},
    )  # fmt: skip
    reset_peak(ranks.device)
    journal.write(
        "resume", step=state.step, pairs_seen=state.pairs_seen, evaluated_step=state.evaluated_step,
        bits_may_differ=run.differs,
    )  # fmt: skip
    if run.differs:
        text = texts_here()
        say(ranks, text("begins.differs", what=text("comma").join(run.differs), step=state.step))
    if request.changed:
        say(ranks, texts_here()("begins.options", names=", ".join(request.changed)))
    if ranks.is_main:
        lines = first_words(run, state, plan, options) + unused_lines(run, request.typed, options)
        for line in lines:
            say(ranks, line)
    say(ranks, warmup_problem(schedule.learn_rate.peak, run.recipe.warmup_steps, run.recipe.num_steps))


def write_events(run, journal, samples, result):
    """Journal what went wrong during a step. Write the ids of its examples to `samples`."""
    if "first step" not in laps():
        lap("first step")
    for kind, values in result.events:
        journal.write(kind, **values)
        say(run.ranks, f"{kind}: {event_line(kind, values)}")
    samples.write("sample", step=result.step, epoch=result.epoch, ids=result.ids)


def log_steps(run, journal, results):
    """Write and say one train line for `results`, the steps since the previous one; returns its values."""
    values = train_values(results, peak_memory(run.ranks.device))
    journal.write("train", **values)
    on_gpu = run.ranks.device.type == "cuda"
    say(run.ranks, train_line({k: v for k, v in values.items() if on_gpu or k not in ("peak_bytes", "reserved_bytes")}))
    return values


def say(ranks, text):
    """Log `text` as one line on the main rank, unless it is empty."""
    if ranks.is_main and text:
        LOGGER.info(text)
