#!/usr/bin/env bash
# A decoder of 64 M parameters (MiniMind's shape) that chats, from your files, in a form that other engines load.
set -euo pipefail
recipe=mini model=mini kind=byte_level vocab_size=6400
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/stages.sh"

read_words "$@"
prepare_all
start=(--model="$model" --tokenizer_dir="$out/tokenizer" --max_seq_len=512)
runs=()
if [[ -n $text ]]; then
    train_stage 1_text text.parquet "${start[@]}" --objective=text --epochs=2
    runs+=("$out/1_text")
    start=(--finetune_from_ckp_file="$out/1_text/best" --max_seq_len=512)
fi
pairs_stage 2_pairs "${start[@]}" --epochs=3
train_stage 3_sft "sft.parquet,pairs.parquet:$(weight_beside sft pairs)" --finetune_from_ckp_file="$out/2_pairs/best" \
    --epochs=3 --max_seq_len=512 --learn_rate=0.03 --against_loops=scalegrad --loops_weight=2.5
runs+=("$out/3_sft")
prefer_stage 3_sft 4_preferences --max_seq_len=512
show_results "${runs[@]}"
