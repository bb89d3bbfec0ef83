#!/usr/bin/env bash
# Fine-tune with the fast preset on all visible GPUs, or on the CPU where there is none; goes on if it can.
set -euo pipefail

usage() {
    cat >&2 <<'END'
usage: train_sft_custom.sh [N=16] [--any_field=value ...]
  N                  pairs a GPU (batch_size_per_gpu), a positive whole number
  --any_field=value  options of train_low_mem.py train; relative paths count from where you stand
NUM_PROCESSES=2 before the command starts that many processes instead of one for each visible GPU.
END
    exit 2
}

is_positive() {
    [[ $1 =~ ^0*[1-9][0-9]*$ ]]
}

count_gpus() {
    local present names name number=0
    present=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') ||
        present=$(compgen -G '/dev/nvidia[0-9]*' | grep -c .) || true
    if [[ $present == 0 || -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
        echo "$present"
        return
    fi
    IFS=', ' read -ra names <<<"$CUDA_VISIBLE_DEVICES"
    for name in "${names[@]}"; do
        [[ $name != -* ]] || break # CUDA ignores what follows a negative number
        number=$((number + 1))
    done
    echo "$number"
}

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
here=$PWD/
[[ ! $PWD -ef $root ]] || here=

pairs=16
if [[ $# -gt 0 && $1 != --* ]]; then
    pairs=$1
    shift
fi
is_positive "$pairs" || usage

words=()
for word in "$@"; do
    case $word in
    --help) usage ;;
    --*[-_]file=[!/]* | --*[-_]dir=[!/]* | --model=[!/]*.json) words+=("${word%%=*}=$here${word#*=}") ;;
    --*) words+=("$word") ;;
    *) usage ;;
    esac
done

num_processes=${NUM_PROCESSES:-$(count_gpus)}
[[ -n ${NUM_PROCESSES:-} || $num_processes != 0 ]] || num_processes=1
is_positive "$num_processes" || usage

cd -- "$root"
python=python3
[[ ! -x .venv/bin/python ]] || python=.venv/bin/python
launch=("$python")
if ((10#$num_processes > 1)); then
    launch+=(-m accelerate.commands.launch --multi_gpu --num_processes "$num_processes" --num_machines 1)
    launch+=(--main_process_port 0 --mixed_precision no --dynamo_backend no)
fi
launch+=(./train_low_mem.py train --is_finetune=True --use_fast_config=True "--batch_size_per_gpu=$pairs")
launch+=(--is_keep_training=auto "${words[@]}")
printf '%q ' "${launch[@]}"
printf '\n'
exec "${launch[@]}"
