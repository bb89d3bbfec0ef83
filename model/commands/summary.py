"""The first and the last words of a run: what will be trained and what came of it, for people."""

import math
import time
from collections import Counter
from pathlib import Path

from config import default_learn_rate
from model.commands.decoding import decoding_line
from model.data.file_request import describe_ignored
from model.display.catalogue import texts_here
from model.display.console import duration
from model.display.durations import durations
from model.display.view import GIB, count_of, devices_of
from model.nn.registry import config_values
from model.run.journal import read_journal
from model.runtime.launcher import command_to_go_on
from model.runtime.versions import device_name
from model.train.lr_schedule import steady_peak
from model.train.objectives.mixed import Mixed

MAX_NAMES = 3  # of files in one line


def first_words(run, state, plan, options):
    """The lines that say what will be trained, how, and for how long; `options` are those of the run by name."""
    text, schedule = texts_here(), run.schedule
    return [
        model_line(run, state, options, text),
        *taught_lines(options, text),
        text("first.training", data=data_text(run.train, text)),
        validation_line(run, text),
        text("first.tokenizer", directory=run.tokenizer.directory, tokens=run.tokenizer.vocab_size),
        steps_line(run, state, options, text),
        text(
            "first.optimizer", name=options['optimizer'], why=text(f"why.{run.recipe.why_optimizer}"),
            rate=rate_text(schedule, text),
            schedule=text(f"schedule.{options['lr_schedule']}"),
        ),
        *rate_lines(run, options, text),
        *dropout_lines(run, options, text),
        plan_line(run, plan, options, text),
        text(
            "first.run", run_dir=run.dir, save_steps=options['save_steps'],
            save_time=duration(options['save_seconds'], text),
            expected=expected_text(run, state, text),
        ),
    ]  # fmt: skip


def unused_lines(run, typed, options):
    """A line for each option of `typed`, names on the command line, that is set and that this run does not use."""
    text, ranks = texts_here(), run.ranks
    unused = dict(
        reduce_dtype=options["reduce_dtype"] != "float32" and ranks.world_size == 1,
        gpu_memory_limit_gb=options["gpu_memory_limit_gb"] and ranks.device.type == "cpu",
    )
    return [text(f"unused.{name}", value=options[name]) for name in sorted(typed) if unused.get(name)]


def steps_line(run, state, options, text):
    """Steps and pairs of the run; max_steps counts steps of another size where the batch has changed."""
    schedule, asked = run.schedule, options["max_steps"]
    said = text(
        "first.steps", steps=run.total_steps(state), batch=schedule.global_batch, pairs=run.train.epoch_pairs,
        epochs=f"{schedule.total_pairs / run.train.epoch_pairs:.4g}",
    )  # fmt: skip
    if asked and state.first_batch != schedule.global_batch:
        said += text("steps.asked", asked=asked, batch=state.first_batch)
    return said


def rate_text(schedule, text):
    """The peak learning rate and the steps of the warm-up, without those of a warm-up that ends with the first step."""
    steps = schedule.learn_rate.warmup_pairs / schedule.global_batch
    return text("rate.warmed" if round(steps) else "rate.at_once", peak=schedule.learn_rate.peak, steps=steps)


def model_line(run, state, options, text):
    source, part = options["finetune_from_ckp_file"], options["trainable"]
    values = config_values(run.model.config)
    family = values.get("model_type", values["family"])
    origin = text("first.tuned", source=source) if source else ""
    origin = text("first.going_on", step=state.step) if state.step else origin or text("first.random")
    if part != "all":
        origin = text("first.partly", text=origin, part=part)
    if run.model.lora:
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        packed = text("adapter.nf4") if options["base_precision"] == "nf4" else ""
        rank = run.model.lora.rank
        origin = text("first.adapter", text=origin, rank=rank, trained=count_of(trained, text), packed=packed)
    name = family if source else f"{family} {options['model']}".strip()
    return text(
        "first.model",
        name=name,
        origin=origin,
        parameters=count_of(sum(p.numel() for p in run.model.parameters()), text),
    )


def taught_lines(options, text):
    """The line about teachers; none without them."""
    if not options["teacher"]:
        return []
    share, temperature = options["distill_weight"], options["distill_temperature"]
    return [text("first.taught", names=options["teacher"], share=share, temperature=temperature)]


def rate_lines(run, options, text):
    """A line where the default learning rate was lowered for a long run, or a typed one is too high for it."""
    steps, peak, usual = run.recipe.num_steps, run.schedule.learn_rate.peak, default_learn_rate(run.recipe.config)
    steady = steady_peak(options["lr_schedule"], steps)
    if options["optimizer"] == "adamw":
        return []
    if peak > 1.1 * steady:
        return [text("rate.high", peak=peak, steps=steps, steady=steady)]
    is_lowered = peak < usual and abs(peak / steady - 1) < 0.01
    return [text("rate.lower", peak=peak, steps=steps, usual=usual)] if is_lowered else []


def dropout_lines(run, options, text):
    """The line about a dropout that was chosen by the data; none where it was not."""
    if not run.recipe.why_dropout:
        return []
    pairs, weights = run.train.epoch_pairs, sum(p.numel() for p in run.model.parameters())
    passes = run.schedule.total_pairs / pairs
    why = text(f"dropout.{run.recipe.why_dropout}", pairs=pairs, passes=passes, weights=count_of(weights, text))
    return [text("first.dropout", dropout=options["dropout"], why=why)]


def data_text(examples, text):
    """Files and pairs of these Examples, mean lengths with the share that was cut, what is left out."""
    meta, rows, most = examples.store.meta, len(examples), examples.store.meta["source"]["max_seq_len"]
    counted = zip(examples.store.rows.column_names, meta["tokens"], meta["cut"], strict=True)
    columns = [(name.removesuffix("_ids"), *counts) for name, *counts in counted if name.endswith("_ids")]
    parts = text("comma").join(
        text("data.column", column=text.get(f"column.{name}", name), mean=tokens / rows, share=cut / rows, most=most)
        for name, tokens, cut in columns
    )
    chunks, names = meta.get("chunks", 0), names_text(examples, text)
    said = text("data", names=names, rows=rows, columns=parts)
    if chunks:
        counted = text("data.pairs", count=rows - chunks) if rows > chunks else ""
        counted += text("data.chunks", count=chunks, texts=meta["texts"])
        mean = sum(tokens for _, tokens, _ in columns) / rows
        said = text("data.texts", names=names, counted=counted, mean=mean)
    said += text("data.turns", count=meta["turns_left_out"]) if meta["turns_left_out"] else ""
    said += text("data.moved", count=meta["systems_moved"]) if meta.get("systems_moved") else ""
    said += text("data.blank" if chunks == rows else "data.empty", count=meta["empty"]) if meta["empty"] else ""
    ignored = Counter({(kind, name): count for kind, name, count in meta.get("ignored_counts", ())})
    not_used = describe_ignored(ignored, lambda name: text(f"ignored.{name}")) or meta["ignored"]
    return said + text("data.not_used", what=not_used) if not_used else said


def names_text(examples, text):
    """Names of the files, each with its objective where they have several, and its weight if it is not 1."""
    names = [Path(file["path"]).name for file in examples.store.meta["source"]["files"]]
    if isinstance(examples.objective, Mixed):
        names = [f"{part.name}:{name}" for part, name in zip(examples.objective.parts, names, strict=True)]
    if mixture := examples.mixture:
        weights = [mixture.weight_of(file) for file in range(len(names))]
        names = [name if weight == 1 else f"{name}*{weight:g}" for name, weight in zip(names, weights, strict=True)]
    return (
        text("comma").join(names)
        if len(names) <= MAX_NAMES
        else text("data.others", name=names[0], count=len(names) - 1)
    )


def validation_line(run, text):
    rules = run.rules
    if run.evaluation is None:
        return text("first.unvalidated")
    when = text("when.steps", steps=rules.eval_steps) if rules.eval_steps else text("when.epoch")
    data = data_text(run.evaluation.examples, text)
    return text("first.validation", data=data, when=when, metric=text(f"metric.{rules.best_metric}"))


def plan_line(run, plan, options, text):
    ranks, memory = run.ranks, run.memory
    share_pairs = -(-run.schedule.global_batch // ranks.world_size)
    tokens = min(plan.micro_batch_tokens, share_pairs * run.train.histogram.longest)
    how = text("how.checkpointing") if plan.gradient_checkpointing else ""
    how += text("how.graphs") if plan.graphs else ""
    sends = ranks.world_size > 1 and options["reduce_dtype"] != "float32"
    peaks = [phase["measured"] or phase["predicted"] for phase in memory["phases"].values()]
    limit = memory["cap_bytes"]
    peak = f"{max(peaks) / GIB:.1f}"
    used = text("memory.card", peak=peak, limit=f"{limit / GIB:.1f}") if limit else text("memory.host", peak=peak)
    return text(
        "first.plan", where=devices_of(ranks.world_size, device_name(ranks.device), text), how=how, tokens=tokens,
        sent=text("how.sent", dtype=options["reduce_dtype"]) if sends else "",
        dtype=str(run.model.compute_dtype).removeprefix("torch."), memory=used,
        passes=max(1, math.ceil(run.train.histogram.mean * share_pairs / tokens)),
    )  # fmt: skip


def expected_text(run, state, text):
    """How long the steps that are left will take, by the dry run; nothing if it measured none."""
    seconds = run.memory.get("step_seconds")
    if not seconds:
        return ""
    steps = run.total_steps(state) - state.step
    return text("expected", time=duration(seconds * steps, text), steps=steps)


def last_words(run, state, reason, decoding=None):
    """The lines that say how the run ended, what is best, where the time went and what to type next.

    `decoding` is what `choose_decoding` gives.
    """
    text = texts_here()
    ended = text(f"last.{reason}", step=state.step, pairs=state.pairs_seen, run_dir=run.dir)
    spent = durations(read_journal(run.dir / "metrics.jsonl"), time.time())
    total = sum(spent.values())
    parts = text("comma").join(
        text("last.part", kind=text(f"kind.{kind}"), time=duration(seconds, text), percent=100 * seconds / (total or 1))
        for kind, seconds in spent.items()
    )
    lines = [f"{run.dir}: {ended}", *best_line(run, state, text), *filter(None, [decoding_line(run, decoding)])]
    lines.append(text("last.time", total=duration(total, text), parts=parts))
    if reason == "asked":
        return [*lines, text("next.resume", command=command_to_go_on(run.dir))]
    return lines + next_lines(run, state, text)


def best_line(run, state, text):
    if state.best_loss is None:
        return []
    metric, score = run.rules.best_metric, ""
    if state.best_score is not None:
        score = text("last.score", metric=text(f"metric.{metric}"), score=state.best_score)
    return [text("last.best", step=state.best_step, loss=state.best_loss, score=score, folder=run.dir / "best")]


def next_lines(run, state, text):
    """What to type next."""
    model = run.dir / ("last" if state.best_loss is None else "best")
    see = "plot" if run.rules.draws_plots else "curves"
    return [text(f"next.{what}", model=model, run_dir=run.dir) for what in ("chat", "serve", "test", see)]
