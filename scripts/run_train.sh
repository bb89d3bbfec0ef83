#!/usr/bin/env bash
# Train by the profiles that people know from DeepSpeed: here they are memory levers, and nothing is sharded.
set -euo pipefail

usage() {
    cat >&2 <<'END'
usage: run_train.sh -t PROFILE [--any_field=value ...]
  deepspeed        GPU above 12 GB: nothing given up
  stage2_offload   6 to 12 GB: the plan chooses how steps are cut and recorded
  stage3           4 to 6 GB: Adafactor, whose state takes no memory
  minimal          below 4 GB: Adafactor and gradient checkpointing
  --any_field=value  options of train_low_mem.py train
NUM_PROCESSES=2 before the command starts that many processes instead of one for each visible GPU.
END
    exit 2
}

[[ $# -ge 2 && $1 == -t ]] || usage
case $2 in
deepspeed) levers=() ;;
stage2_offload) levers=(--gpu_memory_limit_gb=12) ;;
stage3) levers=(--gpu_memory_limit_gb=6 --optimizer=adafactor --learn_rate=0.01) ;;
minimal) levers=(--gpu_memory_limit_gb=4 --optimizer=adafactor --learn_rate=0.01 --gradient_checkpointing=True) ;;
*) usage ;;
esac
shift 2
for word in "$@"; do
    [[ $word == --* ]] || usage
done

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
cd -- "$root"
python=python3
[[ ! -x .venv/bin/python ]] || python=.venv/bin/python
num_processes=${NUM_PROCESSES:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)}
launch=("$python")
if ((10#${num_processes:-0} > 1)); then
    launch+=(-m accelerate.commands.launch --multi_gpu --num_processes "$num_processes" --num_machines 1)
    launch+=(--main_process_port 0 --mixed_precision no --dynamo_backend no)
fi
launch+=(./train_low_mem.py train --is_keep_training=auto "${levers[@]}" "$@")
printf '%q ' "${launch[@]}"
printf '\n'
exec "${launch[@]}"
