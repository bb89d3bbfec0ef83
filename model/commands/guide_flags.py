"""Reads the command lines of LoRA guides: flags of transformers, PEFT and bitsandbytes become options of a run."""

import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from config import TrainConfig
from model.commands.model_cache import find_model
from model.commands.option_names import OWN_NAMES, unknown_option, why_needless
from model.commands.options import FLAGS, parse_options
from model.commands.scripts_zh import NEEDLESS_ZH
from model.data.file_list import data_files
from model.display.catalogue import texts_here

# what the guides recommend for 16 GB, for what is not on the command line
DEFAULTS = dict(
    output_dir="output", epochs="3", batch_size_per_gpu="1", gradient_accumulation_steps="16", max_seq_len="1024",
    lora_rank="32",
)  # fmt: skip
REPLACED_BY = {"epochs": "max_steps", "batch_size_per_gpu": "global_batch_size",
               "gradient_accumulation_steps": "global_batch_size"}  # fmt: skip
NOTHING, FOUR_BITS = "", dict(true="base_precision=nf4", false="base_precision=auto")
DTYPES = dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "mixed_precision=bf16")
DTYPES |= dict.fromkeys(("float32", "fp32", "torch.float32"), "mixed_precision=no") | dict(auto="mixed_precision=auto")
ADAMW = (
    "adamw_torch adamw_torch_fused adamw_hf adamw_8bit adamw_bnb_8bit paged_adamw paged_adamw_8bit paged_adamw_32bit"
)
NO_FP16 = "type --bf16, or nothing for bf16 where the GPU has it, else float32"
# flags whose values have other names: each value's option, NOTHING for what is so anyway, and what to do about others;
# "" there: they are handed on under the option's name
VALUES = {
    "use_4bit": (FOUR_BITS, "give no value, or True or False"),
    "load_in_4bit": (FOUR_BITS, "give no value, or True or False"),
    "load_in_8bit": (dict(false=NOTHING), "the base is held in four bits with --use_4bit, else in bf16: leave it out"),
    "quantization_bit": ({"4": "base_precision=nf4"}, "the base is held in four bits, or in bf16: leave it out"),
    "bnb_4bit_quant_type": ({"nf4": NOTHING}, "four bits are NF4 here: leave it out"),
    "bnb_4bit_use_double_quant": ({"true": NOTHING}, "NF4 is always quantised twice here: leave it out"),
    "bnb_4bit_compute_dtype": (DTYPES, NO_FP16),
    "bf16": (dict(true="mixed_precision=bf16", false="mixed_precision=no"), "give no value, or True or False"),
    "fp16": ({"false": NOTHING}, NO_FP16),
    "torch_dtype": (DTYPES, NO_FP16),
    "optim": (dict.fromkeys(ADAMW.split(), "optimizer=adamw"), ""),
    "lr_scheduler_type": (dict(warmup_stable_decay="lr_schedule=wsd"), ""),
    "save_strategy": (dict(steps=NOTHING), "type --save_steps=N and --save_seconds=N"),
    "save_total_limit": ({"1": "keep_latest_n_ckp=2"}, ""),
    "resume_from_checkpoint": (
        dict(true="is_keep_training=True", false="is_keep_training=False"),
        "a run goes on from its newest checkpoint: give its --output_dir, and no value here",
    ),
    "overwrite_output_dir": (dict(true="overwrite=True", false=NOTHING), "give no value, or True or False"),
    "lora_bias": ({"none": NOTHING}, "no bias is trained: leave it out"),
    "bias": ({"none": NOTHING}, "no bias is trained: leave it out"),
    "init_lora_weights": (
        {"true": NOTHING, "gaussian": "lora_init=gaussian"}, "give True (uniform) or gaussian: B is zero",
    ),
    "use_dora": ({"false": NOTHING}, "DoRA is not supported: leave it out for LoRA, or type --use_rslora"),
    "modules_to_save": ({"none": NOTHING, "[]": NOTHING, "": NOTHING}, "no other weights are trained: leave it out"),
    "fan_in_fan_out": ({"false": NOTHING}, "it is of Conv1D layers, which no network here has: leave it out"),
    "use_lora": ({"true": NOTHING}, "for all weights, type python train_low_mem.py train"),
    "finetuning_type": ({"lora": NOTHING}, "for all weights, type python train_low_mem.py train"),
    "task_type": ({"causal_lm": NOTHING, "seq_2_seq_lm": NOTHING}, "the model's config.json decides: leave it out"),
    "report_to": (dict(none="tracker=", tensorboard="tracker=tensorboard", wandb="tracker=wandb"), ""),
    "do_train": ({"true": NOTHING}, "type python train_low_mem.py plan or test"),
} | dict.fromkeys(
    ("eval_strategy", "evaluation_strategy"),
    (dict(no="validation_file=", epoch="eval_steps=0", steps=NOTHING), "give no, epoch, or steps with --eval_steps=N"),
) | dict.fromkeys(
    ("lora_target_modules", "target_modules", "lora_target"),
    ({"all-linear": "lora_targets=", "all": "lora_targets="}, ""),
)  # fmt: skip
OWN = {f.name for f in fields(TrainConfig)} | set(FLAGS)
LISTS = ("lora_targets", "train_file", "validation_file")
HELD_OUT = {
    name: re.compile(rf"(^|[._-])({words})($|[._-])", re.IGNORECASE)
    for name, words in dict(test_file="test", validation_file="valid|validation|val|dev|eval").items()
}  # by the names of files in a folder


@dataclass
class Reading:
    """Options read so far, what to tell about each flag, and problems."""

    options: dict = field(default_factory=dict)
    told: list = field(default_factory=list)
    problems: list = field(default_factory=list)

    def set(self, flag, option):
        """Take an option, NAME=VALUE, that `flag` stands for."""
        name, value = option.split("=", 1)
        if self.options.setdefault(name, value) != value:
            self.problems.append(f"{flag} is --{option}, and another flag is --{name}={self.options[name]}: give one")
        self.told.append(f"{flag}: {option}")


def read_guide(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(options of train, a line about each flag) of a guide's command line. Imports no torch.

    Raises one ValueError that lists every problem.
    """
    flags, problems = _split(words)
    reading = Reading(problems=problems)
    for name, values in flags.items():
        _translate(reading, name, values)
    typed_as = {OWN_NAMES.get(name, name): name for name in flags}
    _find_base(reading, typed_as)
    _find_data(reading, typed_as)
    _add_defaults(reading)
    try:
        parse_options((), reading.options)
    except ValueError as error:
        said = str(error)
        for own, typed in typed_as.items():
            said = re.sub(rf"--{re.escape(own)}(?!\w)", f"--{typed}", said)
        lines = said.splitlines()
        reading.problems += [line.strip() for line in lines[1:]] or lines
    if reading.problems:
        found = "".join(f"\n  {problem}" for problem in dict.fromkeys(reading.problems))
        raise ValueError(f"cannot run with these options:{found}")
    return reading.options, reading.told


def _split(words):
    """({flag: its values}, problems); a flag without a value has ["True"]."""
    flags, problems, name = {}, [], None
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in flags:
                problems.append(f"--{name} is given twice")
            flags[name] = [value] if sign else []
        elif name is None or word.startswith("-") and not re.fullmatch(r"-[\d.]+(e-?\d+)?", word):
            problems.append(f"cannot read {word!r}: options are written --name value or --name=value")
        else:
            flags[name].append(word)
    flags.pop("local_rank", None)  # older launchers add it
    return {name: values or ["True"] for name, values in flags.items()}, problems


def _translate(reading, name, values):
    """Add what a flag with these values stands for."""
    own = OWN_NAMES.get(name, name)
    if len(values) > 1 and own not in LISTS:
        reading.problems.append(f"--{name} {' '.join(values)}: give it one value")
        return
    value = ",".join(values)
    flag = f"--{name} {value}" if value != "True" else f"--{name}"
    known, instead = VALUES.get(name, ({}, ""))
    if value.lower() in known:
        option = known[value.lower()]
        reading.set(flag, option) if option else reading.told.append(texts_here()("guide.anyway", flag=flag))
    elif instead:
        reading.problems.append(f"{flag}: {instead}")
    elif "=" not in own and own in OWN:
        reading.set(flag, f"{own}={value}")
    elif name in OWN_NAMES and value.lower() == "true":
        reading.set(flag, own)
    elif why := why_needless(name):
        why = NEEDLESS_ZH.get(why, why) if texts_here().language == "zh" else why
        reading.told.append(texts_here()("guide.needless", flag=flag, why=why))
    else:
        reading.problems.append(_unknown(name))


def _unknown(name):
    others = [other for other in (*OWN_NAMES, *VALUES) if other not in OWN]
    return unknown_option(name, [*OWN, *others]).replace("--base_precision=nf4", "--use_4bit")


def _find_base(reading, typed_as):
    """Replace a model's name by the directory where it is."""
    source = reading.options.get("finetune_from_ckp_file")
    if not source:
        if not _resumes(reading.options):
            reading.problems.append("--model_name_or_path is missing: a model's directory, or its name on Hugging Face")
        return
    try:
        found = find_model(source)
    except ValueError as error:
        reading.problems.append(f"--{typed_as.get('finetune_from_ckp_file', 'model_name_or_path')} {error}")
        return
    if found != source:
        reading.options["finetune_from_ckp_file"] = found
        reading.told.append(texts_here()("guide.found", source=source, found=found))


def _find_data(reading, typed_as):
    """Take files for validation and test out of a folder of training data, by their names."""
    options, name = reading.options, typed_as.get("train_file", "data_path")
    source = options.get("train_file")
    if not source:
        if not _resumes(options):
            reading.problems.append("--data_path is missing: a file or a folder of json, jsonl, parquet, csv or tsv")
        return
    try:
        paths = [file.path for file in data_files(source)]
    except ValueError:  # parse_options reports it
        return
    reading.problems += [f"--{name} {path}: no such file or folder" for path in paths if not os.path.exists(path)]
    if os.path.isdir(source):
        _hold_out(reading, paths)
    if "validation_file" not in options:
        options["validation_file"] = ""
        reading.told.append(texts_here()("guide.unvalidated"))


def _hold_out(reading, paths):
    """Train only on those of a folder's `paths` whose names do not say that they are for validation or test."""
    left = paths
    for name, pattern in HELD_OUT.items():
        held = [path for path in left if pattern.search(Path(path).stem)]
        if held and len(held) < len(left):
            left = [path for path in left if path not in held]
            if name not in reading.options:
                reading.set(texts_here()("guide.held", names=", ".join(held)), f"{name}={','.join(held)}")
    if left != paths:
        reading.options["train_file"] = ",".join(left)


def _resumes(options):
    return options.get("is_keep_training", "").lower() == "true"


def _add_defaults(reading):
    """Fill in what the command line lacks; a second start in the same directory goes on."""
    options = reading.options
    added = {
        name: value for name, value in DEFAULTS.items()
        if name not in options and REPLACED_BY.get(name, name) not in options
    }  # fmt: skip
    if options.get("overwrite", "").lower() in ("", "false"):
        added |= {} if "is_keep_training" in options else dict(is_keep_training="auto")
    if _resumes(options):  # the run has its own
        added = {name: value for name, value in added.items() if name == "output_dir"}
    options |= added
    if added:
        values = ", ".join(f"{name}={value}" for name, value in added.items())
        reading.told.append(texts_here()("guide.added", values=values))
