#!/usr/bin/env bash
# Fine-tune with the fast preset on all visible GPUs, or on the CPU where there is none; resumes a run if there is one.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/launch.sh"

usage() {
    ! in_chinese || usage_zh
    cat >&2 <<'END'
usage: train_sft_custom.sh [N=16] [--any_field=value ...]
  N                  pairs per GPU (batch_size_per_gpu), a positive integer
  --any_field=value  options of train_low_mem.py train; relative paths count from your current directory
NUM_PROCESSES=2 before the command starts that many processes instead of one for each visible GPU.
END
    exit 2
}

usage_zh() {
    cat >&2 <<'END'
用法：train_sft_custom.sh [N=16] [--any_field=value ...]
  N                  每块 GPU 的对数（batch_size_per_gpu），正整数
  --any_field=value  train_low_mem.py train 的选项；相对路径从当前目录算起
前面写 NUM_PROCESSES=2 就启动两个进程；不写时每块可见的 GPU 一个。
END
    exit 2
}

pairs=16
if [[ $# -gt 0 && $1 != --* ]]; then
    pairs=$1
    shift
fi
is_positive "$pairs" || refuse "${pairs@Q}: N must be a positive integer, and options are written --name=value"
read_options "$@"
start_training --is_finetune=True --use_fast_config=True "--batch_size_per_gpu=$pairs"
