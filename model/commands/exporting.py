"""Exports the model of a run to best/ and last/, with a card of its data, steps and scores, without paths and times."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from config import TrainConfig
from model.commands.run_files import described_objective
from model.data.file_list import names_of
from model.formats.carried import (
    CHOSEN,
    GENERATION_FILE,
    OF_TRAINING,
    RECORD,
    carried_values,
    record_of,
    with_settings,
)
from model.formats.model_card import CardFacts, hub_name
from model.generate.sampling import sampling_from
from model.nn.registry import config_values, family_of
from model.run.journal import read_journal
from model.run.saver import try_export
from model.runtime.versions import device_name, versions
from model.runtime.watchdog import saving

CHOICES = ("max_new_tokens", "no_repeat_ngram_size")  # options of a run that exports tell
DECODING = ("temperature", "repetition_penalty")  # options of which one that is given leaves nothing to choose
SCORES = ("nats_per_char", "bleu", "chrf", "loops", "ended", "length_ratio", "distinct_2")  # beside the metrics


def export(run, state, name, scores=None, weights_files=()):
    """Write the model to best/ or last/ of the run; returns the error message of a disk or memory error, or "".

    `scores` are those of an evaluation of these weights; None: they are looked for in the journal. `weights_files` are
    export_model's.
    """
    facts = facts_of(run, state, last_scores(run, state) if scores is None else scores)
    kept = run.dir / "tokenizer"  # what lies where the run read its tokenizer may be another by now
    tokenizer = replace(run.tokenizer, directory=kept) if kept.is_dir() else run.tokenizer
    return try_export(run.model, tokenizer, run.dir / name, generation_of(run), facts, weights_files, run.dir / "base")


def generation_of(run):
    """What the generation_config.json of the run's exports says, beside what it keeps of the base's.

    That the answers in evaluations are not drawn says nothing of how the model shall answer: of a base's file only what
    was chosen for the run is replaced, what was chosen for another run, and a guard against repetition, which the model
    was not measured with.
    """
    kept, chosen = carried_values(run.dir / "base", GENERATION_FILE), chosen_before(run)
    generation = with_settings(run.generation, chosen_settings(run, chosen)) if chosen else run.generation
    if kept is None:
        return generation
    names = {*OF_TRAINING, *filter(partial(is_typed, run.config), CHOICES)}
    if chosen or record_of(kept).get(CHOSEN) or any(is_typed(run.config, name) for name in DECODING):
        names |= generation.keys() - {"max_new_tokens"}
    elif kept.get("no_repeat_ngram_size"):
        names.add("no_repeat_ngram_size")
    return {name: value for name, value in generation.items() if name in names}


def is_typed(config, name):
    """Whether the option `name` is not left at its default."""
    return getattr(config, name) != getattr(TrainConfig, name)


def chosen_settings(run, sampling):
    """What a generation_config.json says of answers with a Sampling that was chosen on validation questions."""
    values = run.settings(sampling)
    return values | {RECORD: record_of(values) | {CHOSEN: True}}


def chosen_before(run):
    """The Sampling that an earlier end of this run chose for its exports; None: none did, or another is asked for."""
    if any(is_typed(run.config, name) for name in DECODING):
        return None
    try:
        values = carried_values(run.dir / "best", GENERATION_FILE) or {}
        return sampling_from(values) if record_of(values).get(CHOSEN) else None
    except ValueError:  # a damaged file is written anew
        return None


def export_last(run, state, failure="", weights_files=()):
    """Export last/; raises RuntimeError if the export fails, or if `failure` says that an earlier write did."""
    if run.ranks.is_main:
        with saving():
            failure = failure or export(run, state, "last", weights_files=weights_files)
    if failure:
        raise RuntimeError(f"the run's end is not on disk ({failure}): solve that, then add --is_keep_training=True")


def is_early(run, state):
    """Whether a run that is finished ends before its last pair."""
    return state.pairs_seen < run.schedule.total_pairs


def facts_of(run, state, scores):
    """CardFacts of the weights after the step of `state`; `scores` are those of an evaluation of them, or empty."""
    values, name = config_values(run.model.config), run.dir.resolve().name
    family = values.get("model_type", values["family"])
    num_parameters = sum(p.numel() for p in run.model.parameters())
    steps = f"after {state.step:,} of {run.total_steps(state):,} steps"
    return CardFacts(
        title=name,
        summary=f"A chat model ({family}, {num_parameters:,} parameters), {steps} of the run {name}.",
        tables={"Data": _data(run), "Training": _training(run, state)},
        file="" if run.evaluation is None else file_names(run.evaluation.examples),
        scores={name: scores[name] for name in score_names(run) if math.isfinite(scores.get(name, math.nan))},
        optimizer=run.config.optimizer,
        base=hub_name(run.config.finetune_from_ckp_file),
    )


def last_scores(run, state):
    """The scores in the journal of the weights after the step of `state`; empty if they were not evaluated."""
    try:
        records = read_journal(run.dir / "metrics.jsonl")
    except (OSError, ValueError):  # the model matters more than its card
        return {}
    found = [record for record in records if record["kind"] == "eval" and record["step"] == state.step]
    if not found or found[-1].get("averaged"):  # the scores are those of their average
        return {"loss": found[-1]["weights_loss"]} if found else {}
    return {name: found[-1][name] for name in score_names(run) if isinstance(found[-1].get(name), float)}


def score_names(run):
    """The figures of an evaluation that a card tells, the loss first."""
    return (*run.train.objective.metrics, *SCORES)


def file_names(examples):
    """Names of the files of these Examples."""
    return names_of([Path(file["path"]).name for file in examples.store.meta["source"]["files"]])


def _data(run):
    train, is_whole = run.train, family_of(run.model.config).reads_one_stream
    unit, where = ("dialogue", "in all") if is_whole else ("pair", "a column")
    length = f"{run.config.max_seq_len} tokens {where}"
    validated = "nothing"
    if run.evaluation is not None:
        validated = f"{file_names(run.evaluation.examples)}, {len(run.evaluation.examples):,} pairs"
    return {
        "trained on": f"{file_names(train)}, {train.epoch_pairs:,} pairs an epoch",
        "validated on": validated,
        f"tokens of a {unit}": f"{train.histogram.mean:.0f} on average, cut to {length}",
        "tokenizer": f"{run.tokenizer.vocab_size:,} tokens, fingerprint {run.tokenizer.fingerprint}",
    }


def _training(run, state):
    config, ranks = run.config, run.ranks
    start = config.finetune_from_ckp_file
    dtype = str(run.model.compute_dtype).removeprefix("torch.")
    seen = f"{state.pairs_seen:,} pairs, {state.pairs_seen / run.train.epoch_pairs:.4g} epochs"
    return {
        "started from": "/".join(Path(start).parts[-2:]) if start else "random weights",
        "trained": f"LoRA of rank {config.lora_rank} on {Path(start).name}" if config.lora_rank else config.trainable,
        "objective": described_objective(config, run.recipe.teachers),
        "seen": f"{seen}, {run.schedule.global_batch} a step",
        "optimizer": f"{config.optimizer}, peak learning rate {config.learn_rate:g}, {config.lr_schedule} schedule",
        "regularisation": f"dropout {config.dropout:g}, weight decay {config.weight_decay:g}, "
        f"label smoothing {config.label_smoothing:g}, average of the weights {config.average:g}, "
        f"against loops {config.against_loops}",
        "seed": config.seed,
        "computed on": f"{ranks.world_size} x {device_name(ranks.device)}, {dtype}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items() if number),
    }
