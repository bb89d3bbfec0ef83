"""Options by the names that they have elsewhere: Hugging Face's TrainingArguments, LLaMA-Factory, nanoGPT, guides."""

import re
from difflib import get_close_matches

NEAR = 0.8  # likeness of two names, at most 1: below it a nearest name misleads

NAMES_ELSEWHERE = {  # what to type here: what others call it
    "batch_size_per_gpu": "batch_size train_batch_size per_device_train_batch_size per_gpu_train_batch_size "
    "micro_batch_size device_batch_size per_device_batch_size train_micro_batch_size_per_gpu",
    "global_batch_size": "total_batch_size effective_batch_size rows_per_step",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps accum accum_steps "
    "accumulation_steps accumulate_grad_batches",
    "learn_rate": "lr learning_rate base_lr peak_lr max_lr",
    "warmup_steps": "warmup num_warmup_steps warmup_iters",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler lr_decay_style",
    "optimizer": "optim optimizer_type optimizer_name",
    "max_grad_norm": "clip_grad clip_grad_norm grad_clip gradient_clipping gradient_clip_val",
    "weight_decay": "wd",
    "epochs": "num_train_epochs num_epochs max_epochs n_epochs train_epochs",
    "seed": "random_seed data_seed",
    "mixed_precision": "fp16 precision dtype torch_dtype amp",
    "mixed_precision=bf16": "bf16 pure_bf16 use_bf16",
    "compile": "torch_compile use_compile",
    "deterministic": "full_determinism",
    "gradient_checkpointing": "activation_checkpointing use_gradient_checkpointing grad_checkpoint",
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
    "from_pretrained checkpoint_path",
    "is_finetune=True": "finetune sft do_sft",
    "is_keep_training=True": "resume resume_from_checkpoint resume_from resume_training continue_training",
    "overwrite=True": "overwrite_output_dir",
    "output_dir": "out_dir output output_path save_dir save_path checkpoint_dir ckpt_dir",
    "logging_steps": "log_interval log_every log_steps logging_interval",
    "eval_steps": "eval_interval eval_every",
    "save_steps": "save_interval save_every checkpoint_interval",
    "keep_latest_n_ckp": "save_total_limit",
    "backend": "ddp_backend dist_backend",
    "ddp_timeout_s": "ddp_timeout",
}
OURS = {theirs: ours for ours, names in NAMES_ELSEWHERE.items() for theirs in names.split()}

NOT_HERE = {  # pattern of names: what to do instead
    r"num_processes|nproc_per_node|num_gpus|n_gpus|world_size": "a launcher starts processes, as README.md shows: "
    "torchrun, accelerate",
    r"(deepspeed|zero|fsdp|megatron|offload)(_\w+)?": "each GPU holds the whole model: for less memory type "
    "--gpu_memory_limit_gb=G, --optimizer=adafactor or --gradient_checkpointing=True; `plan` tells what each changes",
    r"(max|num|total|num_train|max_train)_(steps|iters|iterations|updates)|train_steps|train_iters": "a run is as long "
    "as its passes over train_file: type --epochs=N; `plan` tells the steps",
    r"(use_)?(lora|qlora|peft|adapter)(_\w+)?|finetuning_type|quantization_bit|load_in_[48]bit|use_rslora": "all "
    "weights are trained, or the decoder's alone with --trainable=decoder",
    r"warmup_ratio|warmup_fraction": "the warm-up is a tenth of the run, or what --warmup_steps=N says",
    r"(eval|evaluation)_strategy": "type --eval_steps=N, or 0 for once an epoch",
    r"save_strategy": "type --save_steps=N and --save_seconds=N",
    r"(per_device_|per_gpu_)?(eval|test|valid)_batch_size": "evaluation is cut to what fits: leave it out",
    r"auto_(find_)?batch(_size)?": "a step is cut to what fits, whatever its size: leave it out",
    r"(dataloader|preprocessing)_\w+|num_workers|pin_memory": "a thread prepares the next step: leave it out",
    r"(neat_)?packing|group_by_length|pad_to_max_length": "examples are always packed, without padding: leave it out",
    r"attn_implementation|(use_)?flash_attn(ention)?|tf32": "the fastest that the device has is used: leave it out",
    r"load_best_model_at_end|metric_for_best_model": "best/ always has the lowest validation loss: leave it out",
    r"report_to|run_name|logging_dir|log_dir|wandb(_\w+)?|use_wandb|tensorboard\w*": "metrics.jsonl in --output_dir "
    "has every number",
    r"do_(train|eval|predict|test)|stage|task|mode": "the command says what is done: train, plan, test or doctor",
    r"(valid|val|validation|eval|test)_(ratio|split|size|share)": "scripts/prepare_data.py keeps pairs apart: give it "
    "--validation_share",
    r"max(_train|_eval)?_samples|num_samples|max_examples": "all pairs of the file are read: give a shorter file",
    r"vocab_size": "it is the tokenizer's: scripts/train_tokenizer.py --vocab_size, and `plan` takes it",
    r"device|gpus?|gpu_ids?|no_cuda|use_cpu|use_cuda": "set CUDA_VISIBLE_DEVICES, empty for the CPU",
    r"adam_(beta[12]|epsilon)|betas?|beta[12]|momentum": "it is fixed in model/train/optim.py: leave it out",
    r"label_smoothing(_factor)?": "there is no label smoothing; --z_loss keeps the log-normaliser near 0",
    r"(push_to_)?hub\w*": "nothing leaves this machine: best/ and last/ are ordinary Hugging Face directories",
}


def unknown_option(name, known):
    """What to say of an option that is none of the `known`: its name here, what to do instead, or one nearly alike."""
    told = f"unknown option --{name}"
    ours = OURS.get(name, "")
    if ours.split("=")[0] in known:
        return f"{told}: did you mean --{ours}?"
    for pattern, instead in NOT_HERE.items():
        if re.fullmatch(pattern, name):
            return f"{told}: {instead}"
    near = get_close_matches(name, known, n=1, cutoff=NEAR)
    return told + (f": did you mean --{near[0]}?" if near else "; --help shows all")
