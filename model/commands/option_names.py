"""What to type for the option names of other trainers: TrainingArguments of Hugging Face, LLaMA-Factory, nanoGPT.

And for those that were misspelt, of a run or of a script.
"""

import argparse
import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path

from model.commands.scripts_zh import PARSER_ZH, SCRIPTS_ZH
from model.display.catalogue import language_of
from model.runtime.paths import check_path
from model.runtime.terminal import printable

MIN_SIMILARITY = 0.8  # of two names, from 0 to 1: a less similar suggestion misleads
AMONG_FEW = 0.7  # the same, where there are few other names that could have been meant

OTHER_NAMES = {  # what to type here: names that other trainers use
    "batch_size_per_gpu": "batch_size train_batch_size per_device_train_batch_size per_gpu_train_batch_size "
    "micro_batch_size device_batch_size per_device_batch_size train_micro_batch_size_per_gpu",
    "global_batch_size": "total_batch_size effective_batch_size rows_per_step",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps accum accum_steps "
    "accumulation_steps accumulate_grad_batches",
    "learn_rate": "lr learning_rate base_lr peak_lr max_lr",
    "warmup_steps": "warmup num_warmup_steps warmup_iters",
    "warmup_ratio": "warmup_fraction warmup_proportion",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler lr_decay_style",
    "optimizer": "optim optimizer_type optimizer_name",
    "max_grad_norm": "clip_grad clip_grad_norm grad_clip gradient_clipping gradient_clip_val",
    "weight_decay": "wd",
    "label_smoothing": "label_smoothing_factor",
    "beta": "pref_beta dpo_beta",
    "gamma": "simpo_gamma",
    "sft_weight": "rpo_alpha pref_ftx dpo_ftx cpo_alpha",
    "dpo_loss": "pref_loss loss_type",
    "teacher": "teacher_model teacher_model_name_or_path teacher_path",
    "distill_weight": "distillation_weight kd_alpha kd_weight",
    "distill_temperature": "kd_temperature distillation_temperature",
    "lora_rank": "lora_r r lora_dim lora",
    "lora_targets": "lora_target lora_target_modules target_modules",
    "lora_init": "init_lora_weights",
    "epochs": "num_train_epochs num_epochs max_epochs n_epochs train_epochs",
    "max_steps": "num_steps total_steps num_train_steps max_train_steps train_steps max_iters num_iters total_iters "
    "train_iters num_iterations max_updates total_updates num_updates",
    "seed": "random_seed data_seed",
    "mixed_precision": "fp16 precision dtype torch_dtype amp",
    "mixed_precision=bf16": "bf16 pure_bf16 use_bf16",
    "compile": "torch_compile use_compile",
    "share_state=True": "share_update",
    "deterministic": "full_determinism",
    "gradient_checkpointing": "activation_checkpointing use_gradient_checkpointing grad_checkpoint",
    "activation_offload": "activation_offloading activations_offload enable_activation_offload offload_activations",
    "gpu_memory_limit_gb": "max_memory gpu_memory gpu_memory_gb",
    "train_file": "data_path data data_file train_data train_path train_dataset dataset dataset_path dataset_name",
    "validation_file": "validation_data valid_file valid_data val_file eval_file eval_data eval_dataset dev_file",
    "test_file": "test_data test_path",
    "prompt_column": "prompt_col prompt_key input_column source_column",
    "response_column": "response_col response_key output_column target_column",
    "max_seq_len": "max_length max_len max_seq_length seq_len seq_length cutoff_len model_max_length block_size "
    "context_length max_source_length max_target_length source_len target_len",
    "max_new_tokens": "generation_max_length",
    "model": "model_size model_type config_name",
    "tokenizer_dir": "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path",
    "finetune_from_ckp_file": "model_name_or_path pretrained_model_name_or_path model_path model_file init_from "
    "from_pretrained checkpoint_path model_name model_id base_model base_model_name_or_path",
    "is_finetune=True": "finetune sft do_sft",
    "is_keep_training=True": "resume resume_from_checkpoint resume_from resume_training continue_training",
    "overwrite=True": "overwrite_output_dir",
    "output_dir": "out_dir output output_path save_dir save_path checkpoint_dir ckpt_dir",
    "logging_steps": "log_interval log_every log_steps logging_interval",
    "eval_steps": "eval_interval eval_every",
    "best_metric": "metric_for_best_model",
    "early_stop": "early_stopping early_stopping_patience",
    "prompt_prefix": "source_prefix prefix",
    "save_steps": "save_interval save_every checkpoint_interval",
    "keep_latest_n_ckp": "save_total_limit",
    "backend": "ddp_backend dist_backend",
    "ddp_timeout_s": "ddp_timeout",
}
OWN_NAMES = {other: own for own, names in OTHER_NAMES.items() for other in names.split()}

NEEDLESS = {  # pattern of option names: why they may be left out
    r"(per_device_|per_gpu_)?(eval|test|valid)_batch_size": "it is chosen to fit the memory",
    r"auto_(find_)?batch(_size)?": "every step is split to fit the memory",
    r"dataloader_drop_last": "the last step of an epoch may be smaller, and no example is dropped",
    r"(dataloader|preprocessing)_\w+|num_workers|pin_memory": "a thread always prepares the next step",
    r"(neat_)?packing|group_by_length|pad_to_max_length": "examples are always packed, without padding",
    r"attn_implementation|(use_)?flash_attn(ention)?|tf32": "the fastest kernels of the device are used",
    r"load_best_model_at_end": "best/ always has the best model of the run",
    r"device_map|low_cpu_mem_usage": "weights are read from the mapped file straight to the device",
    r"trust_remote_code": "no code of a model is ever run",
    r"(fp16|bf16)_full_eval": "an evaluation computes as the training does, in bf16 where the GPU has it, and keeps no "
    "second copy of the weights",
    r"use_cache": "training keeps no cache of keys and values",
    r"remove_unused_columns|ddp_find_unused_parameters|gradient_checkpointing_kwargs": "it is not needed",
    r"bnb_4bit_(quant_)?storage(_dtype)?|quant_method|llm_int8_\w+|prepare_model_for_kbit_training": "four bits are "
    "kept in bytes, and computed without bitsandbytes",
    r"padding(_side)?|num_proc": "examples are packed without padding, and tokenised once for all runs",
    r"cudnn_benchmark|allow_tf32": "the fastest kernels of the device are used",
}

MISSING_OPTIONS = {  # pattern of option names: what to do instead
    r"exact": "--deterministic=True gives equal bits on equal hardware and an equal number of processes",
    r"num_processes|nproc_per_node|num_gpus|n_gpus|world_size": "a launcher starts the processes, as README.md "
    "shows: torchrun or accelerate",
    r"(?!offload$)(cpu_)?(deepspeed|zero|fsdp|megatron|offload)(_\w+)?": "GPUs share optimizer state and masters with "
    "--share_state=True; for less memory type --gpu_memory_limit_gb=G, --optimizer=adafactor or "
    "--gradient_checkpointing=True; `plan` shows what each saves",
    r"(use_)?(dora|pissa|olora|loftq|adalora|loraplus)(_\w+)?": "only LoRA and rsLoRA are supported: leave it out for "
    "LoRA, or type --use_rslora=True",
    r"use_(lora|peft)|(use_)?(qlora|peft|adapter)(_\w+)?|finetuning_type|quantization_bit|load_in_[48]bit": "an "
    "adapter is trained with --lora_rank=16, on a base that is held in four bits with --base_precision=nf4",
    r"(eval|evaluation)_strategy|do_eval|evaluate": "type --eval_steps=N, 0 for once per epoch, or --validation_file= "
    "for no evaluation",
    r"save_strategy": "type --save_steps=N and --save_seconds=N",
    r"report_to|run_name|logging_dir|log_dir|wandb(_\w+)?|use_wandb|tensorboard\w*": "all metrics are in "
    "metrics.jsonl in --output_dir",
    r"do_(train|predict|test)|stage|task|mode": "type a command instead: train, plan, test or doctor",
    r"(valid|val|validation|eval|test)_(ratio|split|size|share)": "scripts/prepare_data.py splits the data: give it "
    "--validation_share",
    r"max(_train|_eval)?_samples|num_samples|max_examples": "all pairs of the file are used: give a shorter file",
    r"min_(length|len|seq_len|chars)": "pairs of any length are used: drop short ones from the file",
    r"vocab_size": "the tokenizer sets it: type it for scripts/train_tokenizer.py or for `plan`",
    r"device|gpus?|gpu_ids?|no_cuda|use_cpu|use_cuda": "set CUDA_VISIBLE_DEVICES in the environment, empty for the CPU",
    r"adam_(beta[12]|epsilon)|betas|beta[12]|momentum": "the value is fixed in model/train: leave it out",
    r"(push_to_)?hub\w*": "a run uploads nothing: scripts/push.py DIR USER/NAME sends its model",
}


def unknown_option(name, known):
    """Message for an option that is not in `known`: its name here, what to do instead, or the most similar name."""
    message = f"unknown option --{name}"
    own_name = OWN_NAMES.get(name, "")
    if own_name.split("=")[0] in known:
        return f"{message}: did you mean --{own_name}?"
    if why := why_needless(name):
        return f"{message}: {why}: leave it out"
    for pattern, instead in MISSING_OPTIONS.items():
        if re.fullmatch(pattern, name):
            return f"{message}: {instead}"
    return message + _similar(name, known)


def _similar(name, known, cutoff=MIN_SIMILARITY):
    """The end of a message for an unknown option: the most similar name."""
    similar = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f": did you mean --{similar[0]}?" if similar else "; --help shows all options"


def why_needless(name):
    """Why another trainer's option has nothing to set here; "" if it is no such option."""
    return next((why for pattern, why in NEEDLESS.items() if re.fullmatch(pattern, name)), "")


def with_value(words, flag):
    """`words` in which `flag` has its value behind "=": True where none follows, as `train` reads it."""
    joined = []
    for word in words:
        if joined and joined[-1] == flag and word.lower() in ("true", "false"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return [f"{word}=True" if word == flag else word for word in joined]


def true_or_false(text):
    """The bool that a word of the command line spells; raises argparse's error for others."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} must be True or False")
    return text.lower() == "true"


def _as_path(text):
    """The Path of a word of the command line; raises argparse's error for one that no file can have."""
    try:
        check_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


class ScriptParser(argparse.ArgumentParser):
    """An ArgumentParser of scripts, with a Chinese help; it answers an unknown option with the most similar one.

    What has the type Path must be a path that a file can have.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.register("type", Path, _as_path)

    def format_help(self):
        words = SCRIPTS_ZH.get(Path(self.prog).stem, {}) if language_of(os.environ) == "zh" else {}
        if not words:
            return super().format_help()
        self.description = words[""]
        for action in self._actions:
            action.help = words.get(action.dest, action.help)
        text = super().format_help()
        for english, chinese in PARSER_ZH.items():
            text = text.replace(english, chinese, 1)
        return text

    # before argparse, which would rather say that a required option is missing that was misspelt
    def parse_known_args(self, args=None, namespace=None):
        words = list(map(str, sys.argv[1:] if args is None else args))
        known = [option.removeprefix("--") for option in self._option_string_actions if option.startswith("--")]
        options = words[: words.index("--")] if "--" in words else words
        for name in (word[2:].partition("=")[0] for word in options if word.startswith("--")):
            is_begun = self.allow_abbrev and any(other.startswith(name) for other in known)
            if name not in known and not is_begun and " " not in name:  # argparse takes a word with a space as a value
                self.error(f"unknown option --{printable(name)}{_similar(name.replace('-', '_'), known, AMONG_FEW)}")
        return super().parse_known_args(words, namespace)
