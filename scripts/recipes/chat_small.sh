#!/usr/bin/env bash
# A T5 of 48 M parameters that chats, from your files: text, pairs, fine-tuning, its scores and twenty answers.
set -euo pipefail
recipe=chat_small model=small kind=character vocab_size=8000
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/stages.sh"

read_words "$@"
prepare_all
runs=()
start=(--model="$model" --tokenizer_dir="$out/tokenizer")
if [[ -n $text ]]; then
    train_stage 1_text text.parquet "${start[@]}" --objective=span --epochs=3
    runs+=("$out/1_text")
    start=(--finetune_from_ckp_file="$out/1_text/best")
fi
train_stage 2_pairs pairs.parquet "${start[@]}" --epochs=4 --dropout=0.1 --average=0.1
train_stage 3_sft sft.parquet --finetune_from_ckp_file="$out/2_pairs/best" --epochs=3 --dropout=0.1
runs+=("$out/2_pairs" "$out/3_sft")
prefer_stage 3_sft 4_preferences
show_results "${runs[@]}"
