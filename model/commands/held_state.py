"""Which way a run holds masters, state and what its blocks keep: the one that costs least time of those that fit."""

from dataclasses import replace

import torch

from config import UNSHAREABLE
from model.commands.recipe import UNMOVED, with_config
from model.memory.plan import NothingFits, choose_plan


def fitted(recipe, lengths, usable_bytes):
    """`recipe` with what it leaves to the plan: the first of `_ways` to hold masters and state with which a step fits.

    `lengths` are those of its examples; `usable_bytes` are those of a rank's device, None for a CPU. Where no way fits,
    it has the last.
    """
    ways = [with_config(recipe, config) for config in _ways(recipe)]
    return next((way for way in ways if usable_bytes is None or _fits(way, lengths, usable_bytes)), ways[-1])


def _fits(recipe, lengths, usable_bytes):
    try:
        choose_plan(recipe.plan, recipe.estimate(lengths), usable_bytes)
        return True
    except NothingFits:
        return False


def _ways(recipe):
    """The options that `recipe` may have, those that cost least time first; fewer bits come last."""
    config = recipe.config
    many, lone = recipe.machine.num_processes > 1, config.optimizer == "adamw" and may_move(recipe)
    may = dict(
        activation_offload=config.activation_offload == "auto" and may_offload_inputs(recipe),
        share_state=config.share_state == "auto" and may_share(recipe),
        offload=config.offload == "auto" and lone and (not many or config.share_state != "False"),
        master_dtype=config.master_dtype == "auto" and lone and recipe.dtype == torch.bfloat16 and not recipe.spec.lora,
    )
    least = {name: value for name, value in UNMOVED.items() if getattr(config, name) == "auto"}
    moved = dict(activation_offload="True", share_state="True", offload="optimizer", master_dtype="bf16")
    yield replace(config, **least)
    inputs, state = (
        ["activation_offload"],
        (["share_state"], ["offload"], ["master_dtype"], ["offload", "master_dtype"]),
    )
    for names in (inputs, *state, *(inputs + names for names in state)):
        if all(may[name] for name in names):
            also = ["share_state"] if names != inputs and may["share_state"] or many and "offload" in names else []
            yield replace(config, **least | {name: moved[name] for name in (*names, *also)})


def may_offload_inputs(recipe):
    """Whether recomputed blocks' inputs can leave the device, which holds what is not computed again or is captured."""
    config = recipe.config
    return recipe.spec.kernels and config.gradient_checkpointing != "False" and config.compile != "True"


def may_share(recipe):
    """Whether the ranks of a run can share masters and state."""
    return recipe.config.optimizer not in UNSHAREABLE and may_move(recipe) and recipe.machine.num_processes > 1


def may_move(recipe):
    """Whether masters and state may lie elsewhere than whole on each device."""
    return not recipe.config.average
