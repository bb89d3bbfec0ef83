"""Which files the options of a run name, and what the rows of each are learnt for. Imports no torch."""

from dataclasses import replace
from functools import partial

from config import OPTIONS_WITH, PREFERENCE_RATES
from model.data.file_list import data_files, unweighted_files

MIXABLE = ("pairs", "text", "span", "prefix")  # the objectives that may stand before a file's name
PREFERENCES = tuple(PREFERENCE_RATES)
USERS = dict(  # of options that not every objective uses
    prompt_prefix=("pairs", *PREFERENCES), learn_empty_thoughts=("pairs", *PREFERENCES), single_turn=("pairs",),
    span_density=("span",), span_mean=("span",), z_loss=MIXABLE, teacher=MIXABLE, against_loops=MIXABLE,
    beta=PREFERENCES, sft_weight=PREFERENCES, rejected_loops_weight=PREFERENCES, dpo_loss=("dpo",),
    normalize_length=("dpo",), gamma=("simpo",),
)  # fmt: skip
FILE_OPTIONS = dict(
    train_file=data_files, mix=partial(data_files, objectives=MIXABLE),
    validation_file=partial(unweighted_files, split="validation", objectives=MIXABLE),
    test_file=partial(unweighted_files, split="test", objectives=MIXABLE),
)  # fmt: skip


def default_objective(config):
    """That of a file before whose name none stands; with --mix the pairs are what a run is judged on."""
    return "pairs" if config.mix else config.objective


def train_option(config):
    """Name of the option that names the files to train on."""
    return "mix" if config.mix else "train_file"


def files_of(config, option):
    """The DataFiles that an option names, each with an objective; ValueError as of `data_files`."""
    files = FILE_OPTIONS[option](getattr(config, option))
    return tuple(replace(file, objective=file.objective or default_objective(config)) for file in files)


def train_files(config):
    """The DataFiles to train on."""
    return files_of(config, train_option(config))


def named_objectives(config):
    """Names of the objectives that the options name, in the order of MIXABLE, others first."""
    texts = (config.mix, config.validation_file, config.test_file)
    before = {name.partition(":")[0].strip() for text in texts for name in text.split(",") if ":" in name}
    return tuple(dict.fromkeys((default_objective(config), *(name for name in MIXABLE if name in before))))


def not_of_pairs():
    """Names of the options that the objective `pairs` does not use."""
    return tuple(name for name, users in USERS.items() if "pairs" not in users)


def unused_options(config):
    """Names of the options that none of the objectives that the options name uses."""
    named = {*named_objectives(config)}
    unused = [name for name, users in USERS.items() if not named & {*users}]
    return (*unused, *(name for owner in unused for name in OPTIONS_WITH.get(owner, ())))


def judged_objectives(config):
    """Names of the objectives of the validation file."""
    return named_objectives(replace(config, mix="", test_file="", objective=default_objective(config)))


def described_objective(config, teachers=()):
    """The objectives of the training files with their options: what a resumed run must not change.

    `teachers` are the sha256s of the weights of the models that it learns from.
    """
    names = [file.objective for file in train_files(config)] if config.mix else [config.objective]
    noise = f" {config.span_density:g} {config.span_mean:g}"
    taught = " taught by " + " and ".join(sha256[:16] for sha256 in teachers) if teachers else ""
    more = dict(span=noise, dpo=" ipo" * (config.dpo_loss == "ipo"))
    return ", ".join(name + more.get(name, "") for name in names) + taught
