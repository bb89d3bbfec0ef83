#!/usr/bin/env bash
# Train with a profile named as in DeepSpeed: a set of memory options, of which the plan takes what the model needs.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/launch.sh"

usage() {
    ! in_chinese || usage_zh
    cat >&2 <<'END'
usage: run_train.sh -t PROFILE [--any_field=value ...]
  deepspeed        GPU above 12 GB: the fastest plan that fits; GPUs share optimizer state if they must
  stage2_offload   6 to 12 GB: besides, AdamW's state goes to host memory if it must
  stage3           4 to 6 GB: besides, AdamW's weights are held in bf16 alone if they must
  minimal          below 4 GB: Adafactor and gradient checkpointing
  lora             an adapter of rank 16 on a frozen model: --finetune_from_ckp_file=DIR says which
  qlora            the same, with the frozen model in four bits
  --any_field=value  options of train_low_mem.py train; relative paths count from your current directory
NUM_PROCESSES=2 before the command starts that many processes instead of one for each visible GPU.
END
    exit 2
}

usage_zh() {
    cat >&2 <<'END'
用法：run_train.sh -t 配置 [--any_field=value ...]
  deepspeed        显存超过 12 GB：用放得下的最快方案；必要时各 GPU 分担优化器状态
  stage2_offload   6 到 12 GB：必要时再把 AdamW 的状态放到主机内存
  stage3           4 到 6 GB：必要时再让 AdamW 的权重只用 bf16 保存
  minimal          不到 4 GB：Adafactor 和梯度检查点
  lora             底座冻结，训练秩为 16 的适配器：用 --finetune_from_ckp_file=DIR 指定底座
  qlora            同上，底座用 4 位保存
  --any_field=value  train_low_mem.py train 的选项；相对路径从当前目录算起
前面写 NUM_PROCESSES=2 就启动两个进程；不写时每块可见的 GPU 一个。
END
    exit 2
}

[[ $# -ge 2 && $1 == -t ]] || usage
case $2 in # a resumed run keeps its options, so each profile sets all memory options
deepspeed) levers=(--gpu_memory_limit_gb=0 --gradient_checkpointing=auto --offload=none) ;;
stage2_offload) levers=(--gpu_memory_limit_gb=12 --gradient_checkpointing=auto --offload=auto) ;;
stage3) levers=(--gpu_memory_limit_gb=6 --gradient_checkpointing=auto --offload=auto --master_dtype=auto) ;;
minimal) levers=(--gpu_memory_limit_gb=4 --gradient_checkpointing=True --optimizer=adafactor --offload=none) ;;
lora | qlora)
    levers=(--is_finetune=True --lora_rank=16 --gpu_memory_limit_gb=0 --gradient_checkpointing=auto)
    [[ $2 == lora ]] || levers+=(--base_precision=nf4)
    ;;
*) refuse "-t ${2@Q}: no such profile: type one of those above" ;;
esac
shift 2
read_options "$@"
start_training "${levers[@]}"
