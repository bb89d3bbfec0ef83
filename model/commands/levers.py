"""What a run would take with one option changed: its memory, and its time with what it sends."""

from dataclasses import dataclass, replace

import torch

from model.commands.recipe import may_move, may_offload_inputs, may_share, with_config, with_optimizer
from model.display.catalogue import Texts
from model.memory.duration import Gpu, step_seconds
from model.memory.estimate import Estimate
from model.memory.plan import CHUNKS, USABLE, Room, fitting_plan, phase_problem, predicted_peaks
from model.memory.step_time import time_factor
from model.memory.transfers import Links, transfer_seconds

HELD = ("share_state", "offload", "master_dtype")  # the options of where masters and state are held


@dataclass(frozen=True)
class Times:
    """How long steps take on a card and its links."""

    sheet: Gpu | None  # None: the card is not known
    links: Links
    sends_bf16: bool  # gradients between ranks

    def of_step(self, plan, estimate):
        """Expected seconds of a step; None for an unknown card. Ranks that share nothing send while they compute."""
        seconds = self.sheet and step_seconds(plan, estimate, self.sheet)
        moves = estimate.spec.own_part or estimate.spec.offloads
        return seconds and seconds + (self.of_transfers(estimate.spec) if moves else 0)

    def of_transfers(self, spec):
        """Seconds of a step's transfers: between GPUs, and of masters and state to and from host memory."""
        return transfer_seconds(spec, self.links, self.sends_bf16)


@dataclass(frozen=True)
class Lever:
    """One option changed."""

    kind: str
    value: object
    spec: object  # the MemorySpec with it
    batching: tuple


def levers(recipe, chosen, usable, plan, times):
    """For each change of an option: peak bytes, largest micro-batch that fits, time relative to the chosen plan.

    `chosen` is the Estimate of the MemoryPlan `plan`. Those of HELD have the seconds of what is sent too, which count
    in their time where the card is known.
    """
    if usable is None:
        return []
    rows = [*_cuts(recipe, chosen, plan), *_optimizers(recipe, chosen, plan), *_held(recipe, plan)]
    return [_values(row, recipe, chosen, usable, plan, times) for row in rows]


def _cuts(recipe, chosen, plan):
    spec, (tokens, chunk, checkpointing) = chosen.spec, plan.batching
    for size in CHUNKS:
        yield Lever("chunk", size, spec, (tokens, size, checkpointing))
    longest, all_tokens = chosen.lengths.longest, chosen.share_pairs * chosen.lengths.longest
    for size in (tokens // 2, 2 * tokens):  # train refuses smaller ones, and no step has more tokens
        if longest <= size <= all_tokens:
            yield Lever("micro_batch", size, spec, (size, chunk, checkpointing))
    for on, number in {False: 0, True: chosen.num_blocks}.items():
        yield Lever("checkpointing", on, spec, (tokens, chunk, number))
    for on in (False, True) if may_offload_inputs(recipe) else ():
        batching = tokens, chunk, chosen.num_blocks
        yield Lever("activation_offload", on, replace(spec, offloads_inputs=on), batching)


def _optimizers(recipe, chosen, plan):
    for name in ("muon", "adamw_rms", "adafactor"):
        if not chosen.spec.lora and _is_taken(recipe.config, optimizer=name):
            yield Lever("optimizer", name, with_optimizer(chosen.spec, name), plan.batching)


def _held(recipe, plan):
    """The ways to hold masters and state that the run may have, one of HELD changed."""
    config, many = recipe.config, recipe.machine.num_processes > 1
    lone = config.optimizer == "adamw" and may_move(recipe)
    may = dict(
        share_state=may_share(recipe) and config.offload != "optimizer",
        offload=lone and config.share_state in (("True",) if many else ("True", "auto")),
        master_dtype=lone and recipe.dtype == torch.bfloat16 and not recipe.spec.lora,
    )
    values = dict(share_state=("False", "True"), offload=("none", "optimizer"), master_dtype=("float32", "bf16"))
    for name in HELD:
        for value in values[name] if may[name] else ():
            changed = with_config(recipe, replace(config, **{name: value}))
            yield Lever(name, value, changed.spec, plan.batching)


def _values(row, recipe, chosen, usable, plan, times):
    estimate = Estimate(row.spec, chosen.lengths, chosen.share_pairs, chosen.answers)
    room, all_tokens = Room(estimate, usable * USABLE), chosen.share_pairs * chosen.lengths.longest
    largest = fitting_plan(room, all_tokens, *row.batching[1:])
    changed = room.plan(*row.batching, graphs=plan.graphs)
    fits = room.holds(*row.batching) and not phase_problem(phases(recipe, estimate, changed, usable), usable)
    timed = estimate if row.kind == "activation_offload" else chosen
    factor = time_factor(plan.batched_as(row.batching), timed) / time_factor(plan, chosen)
    sent = None
    if row.kind in HELD:
        sent, before = times.of_transfers(row.spec), times.of_step(plan, chosen)
        factor = times.of_step(plan, estimate) / before if before else factor
    return dict(
        lever=Texts("en")(f"lever.{row.kind}", value=row.value), kind=row.kind, value=row.value,
        peak_bytes=estimate.step_peak(*row.batching), fits=fits, time_factor=round(factor, 3), sent_seconds=sent,
        largest_micro_batch_tokens=largest.micro_batch_tokens if largest else 0,
    )  # fmt: skip


def phases(recipe, estimate, plan, usable):
    """Peak bytes by phase, without those that the run has not."""
    evaluates, generates = bool(recipe.config.validation_file), bool(recipe.num_answers)
    has = dict(evaluation=evaluates, generation=evaluates and generates)
    return {name: peak for name, peak in predicted_peaks(estimate, plan, usable).items() if has.get(name, True)}


def _is_taken(config, **options):
    """Whether a run takes these options in place of those of the TrainConfig."""
    try:
        replace(config, **options)
    except ValueError:
        return False
    return True
