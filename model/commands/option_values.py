"""From the texts of a command line to a TrainConfig."""

import math
from dataclasses import asdict, fields
from types import SimpleNamespace

from config import CHOICES, PRESETS, TrainConfig, problems_of_values, with_known_optimizer
from model.runtime.paths import check_path

PLACE = ("output_dir", "ddp_timeout_s")  # needed before the options that a run stores can be read on every rank
PATHS = ("model", "finetune_from_ckp_file", "tokenizer_dir", "choices_file", "output_dir", "teacher")  # not of files
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def as_bool(name, text):
    """Parse True, 1, yes, False, 0 or no, in any case; raises ValueError for anything else."""
    if (word := str(text).strip().lower()) in BOOLEANS:
        return BOOLEANS[word]
    raise ValueError(f"--{name}={text}: this option takes True or False")


def as_type(name, value, kinds):
    """Convert `value` of the option `name` to its type in `kinds`; raises ValueError if that changes the value."""
    if name not in kinds:
        raise ValueError(f"unknown option --{name}")
    kind, text = kinds[name], str(value).strip()
    if kind is bool:
        return as_bool(name, text)
    if kind is str and text in ("True", "False") and "True" not in CHOICES.get(name, ()):
        raise ValueError(f"--{name} has no value: write --{name}=VALUE")
    if kind is str:
        _check_paths(name, str(value))
        is_choice = "True" in CHOICES.get(name, ()) and text.lower() in BOOLEANS
        return str(BOOLEANS[text.lower()]) if is_choice else str(value)
    try:
        if kind is int and text.removeprefix("-").isdecimal():
            return int(text)
        number = float(text)
        if kind is float and math.isfinite(number):
            return number
        if kind is int and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"--{name}={text}: this option takes a {'whole ' if kind is int else ''}number")


def _check_paths(name, text):
    """Raise ValueError if what an option of PATHS names cannot be on a disk."""
    try:
        for path in text.split(",") if name == "teacher" else [text] * (name in PATHS):
            check_path(path)
    except ValueError as error:
        raise ValueError(f"--{name}={error}") from None


def load_config(preset, overrides):
    """TrainConfig of `preset` with the dict `overrides` (option name to text or value) applied.

    Where all weights of a model are trained further, the optimizer stays auto, and a learning rate that is not given 0,
    until the model is read (model/commands/settled.py). Raises one ValueError that lists every problem: unknown
    options, values of the wrong type or out of range.
    """
    values, problems = _typed_values(preset, overrides)
    try:
        config = TrainConfig(**values)
    except ValueError as error:
        problems += str(error).splitlines()[1:]
    raise_if(problems)
    return with_known_optimizer(config)


def config_of_place(preset, overrides):
    """As `load_config` gives it of those overrides alone that say where a run lies; the others are read one by one.

    What contradicts another option is not refused: that is told once the options that the run stores are known.
    """
    values, problems = _typed_values(preset, overrides)
    raise_if(problems + list(problems_of_values(SimpleNamespace(**asdict(TrainConfig()) | values))))
    return load_config(preset, {name: overrides[name] for name in PLACE if name in overrides})


def raise_if(problems):
    """Raise a ValueError that lists the `problems` of options, if there are any."""
    if problems:
        raise ValueError("cannot run with these options:" + "".join(f"\n  {problem.strip()}" for problem in problems))


def _typed_values(preset, overrides):
    """(dict of the values of `preset` with these overrides, messages about what has another type or no such name)."""
    kinds = {f.name: f.type for f in fields(TrainConfig)}
    values, problems = dict(PRESETS[preset]), []
    for name, value in overrides.items():
        try:
            values[name] = as_type(name, value, kinds)
        except ValueError as error:
            problems.append(str(error))
    return values, problems
