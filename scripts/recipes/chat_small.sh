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
    train_stage 1_text text.parquet "${start[@]}" --objective=span --epochs=2
    runs+=("$out/1_text")
    start=(--finetune_from_ckp_file="$out/1_text/best")
fi
pairs_stage 2_pairs "${start[@]}" --epochs=6 --dropout=0.15 --global_batch_size=128 \
    --learn_rate="$(steady_rate pairs 6 128 0.042)"
train_stage 3_sft "sft.parquet,pairs.parquet:$(weight_beside sft pairs)" --finetune_from_ckp_file="$out/2_pairs/best" \
    --epochs=6 --dropout=0.15 --learn_rate=0.03 --against_loops=scalegrad --loops_weight=2.5
runs+=("$out/3_sft")
prefer_stage 3_sft 4_preferences
show_results "${runs[@]}"
