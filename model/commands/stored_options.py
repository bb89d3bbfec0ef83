"""What a resumed run takes from its config.json, and which options typed now may differ from it."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from config import PRESETS, TrainConfig
from model.commands.option_values import load_config
from model.commands.run_files import unused_options
from model.runtime.json_stream import read_object

ANOTHER_RUN = (
    "or start another run, without --is_keep_training=True: --output_dir=DIR keeps both, --overwrite=True moves this "
    "one aside"
)
EXCLUSIVE = (("max_steps", "epochs"), ("mix", "train_file"), ("mix", "objective"), ("choices_file", "test_file"))
ADAPTER_SHAPE = ("lora_rank", "lora_alpha", "lora_targets", "use_rslora", "lora_init", "base_precision")
KEPT_OPTIONS = (
    dict.fromkeys(("optimizer", "trainable"), "has the optimizer state of")
    | dict(prompt_prefix="has trained with", master_dtype="was started with")
    | dict.fromkeys(ADAPTER_SHAPE, "was started with")
)  # those that a run cannot change, with what it has of them
# a resumed run takes these from config.json, even if they were defaults
KEPT_VALUES = ("optimizer", "learn_rate", "warmup_steps")


def stored_options(run_dir, keep, keep_training=False):
    """(preset, options given on the command line) stored in `run_dir` if it is resumed, else None.

    `keep` is a CommandLine's keep_training, `keep_training` the command's default.
    """
    # stored options of a run without checkpoints are ignored
    is_resumed = keep and (keep_training is True or _has_checkpoint(Path(run_dir, "checkpoints")))
    return _read_stored(run_dir) if is_resumed else None


def _has_checkpoint(folder):
    # a checkpoint that a killed process left aside is put back at the start
    return any(any(folder.glob(pattern)) for pattern in ("step_*", ".step_*.aside"))


def merge_options(preset, stored, typed):
    """(dict of the `stored` options overridden by the `typed` ones, their TrainConfig).

    What is stored for another objective than they name is left out. Raises ValueError if they need other initial
    weights or another optimizer state than the run has, or contradict each other.
    """
    config, typed_source = load_config(preset, stored), typed.get("finetune_from_ckp_file")
    source = config.finetune_from_ckp_file
    # an adapter's base may have been moved: its files are compared later
    if typed_source is not None and not config.lora_rank and Path(typed_source).resolve() != Path(source).resolve():
        raise ValueError(
            f"--finetune_from_ckp_file={typed_source}: this run was started from {source or 'random weights'!r}: "
            f"leave it out, {ANOTHER_RUN}"
        )
    if typed.get("master_dtype") == "auto":  # a run keeps what it was started with
        typed = {name: value for name, value in typed.items() if name != "master_dtype"}
    for names in EXCLUSIVE:  # the one typed last counts
        if set(names) & typed.keys():
            stored = {name: value for name, value in stored.items() if name not in names}
    left_out = unused_options(SimpleNamespace(**asdict(load_config(preset, stored)) | typed))
    stored = {name: value for name, value in stored.items() if name not in left_out}
    now = _load_merged(preset, stored, typed)
    for name, what in KEPT_OPTIONS.items():
        if name not in left_out and (before := getattr(config, name)) != getattr(now, name):
            option, instead = _who_set(name, getattr(now, name))
            raise ValueError(f"{option}: this run {what} {name}={before}: {instead}, {ANOTHER_RUN}")
    sizes = ("batch_size_per_gpu", "gradient_accumulation_steps")
    if any(getattr(config, name) != getattr(now, name) for name in sizes):  # the product replaces the global batch
        stored = {name: value for name, value in stored.items() if name != "global_batch_size"}
    return stored | typed, load_config(preset, stored | typed)


def _load_merged(preset, stored, typed):
    """The TrainConfig of the `stored` options overridden by the `typed` ones; ValueError says how to leave one out."""
    try:
        return load_config(preset, stored | typed)
    except ValueError as error:
        named = set(re.findall(r"\b(\w+)=", str(error))) & stored.keys() - typed.keys() - KEPT_OPTIONS.keys()
        ways = (
            f"\n  {name}={stored[name]} is stored with this run: to leave it out, type its default, "
            f"--{name}={PRESETS[preset].get(name, getattr(TrainConfig, name))}"
            for name in sorted(named)
        )
        raise ValueError(str(error) + "".join(ways)) from None


def _who_set(name, value):
    """(the option as the user knows it, what to do about it); a launcher's profile sets options that nobody typed."""
    command = os.environ.get("CHAT_COMMAND", "").strip()
    if not command or f"--{name}" in command.replace("-", "_").replace("__", "--"):
        return f"--{name}={value}", "leave it out"
    return f"{command} means --{name}={value}", "go on with the command that started it"


def _read_stored(run_dir):
    """(preset, options given on the command line) in `run_dir`/config.json, or None if there is none.

    output_dir is `run_dir`, since the directory may have been moved. Raises ValueError if the file is damaged.
    """
    path = Path(run_dir) / "config.json"
    if not path.exists():
        return None
    stored = {}
    try:
        stored = read_object(path)
        # the values that the run used, even if they were defaults: defaults may differ between versions
        kept = {name: stored["config"][name] for name in KEPT_VALUES if name in stored.get("config", {})}
        for name, value in dict(share_state="True", master_dtype="bf16").items():  # what auto became: bits depend on it
            if stored.get("config", {}).get(name) == value:
                kept[name] = value
        if "single_turn" not in stored.get("config", {}):  # a run from before conversations had contexts
            kept["single_turn"] = True
        preset, given = stored["preset"], stored["given"] | kept
        if preset not in PRESETS or not all(isinstance(value, str | int | float) for value in given.values()):
            raise ValueError(f"preset {preset!r} with {given!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if "architectures" in stored:
            raise ValueError(
                f"--output_dir={run_dir} is an exported model: give the run's directory, which holds it, "
                f"or type test {run_dir} to test it"
            ) from None
        raise ValueError(f"{path} cannot be read ({error}): delete it and type the run's options again") from None
    if str(given.pop("share_update", False)) == "True":  # the name of share_state for Muon, which stored runs have
        given["share_state"] = "True"
    if str(given.pop("exact", False)) == "True":
        raise ValueError(
            f"{run_dir} was started with --exact=True, which this version does not have: go on with the version that "
            f"wrote it, {ANOTHER_RUN}"
        )
    return preset, given | dict(output_dir=run_dir)
