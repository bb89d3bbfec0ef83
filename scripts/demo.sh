#!/usr/bin/env bash
# From a fresh machine to a small chat model and its marks: .venv, pairs, tokenizer, training, answers.
# Shorter or longer: DEMO_PAIRS, DEMO_EPOCHS; another folder than .demo: DEMO_DIR (relative to the project's root).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
SECONDS=0
trap 'exit 130' INT # a training that is asked to stop ends with 0

pairs=${DEMO_PAIRS:-12000}
epochs=${DEMO_EPOCHS:-18}
demo=${DEMO_DIR:-.demo}

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
launch=(python)
if ((gpus > 1)); then
    launch=(accelerate launch --multi_gpu --num_processes "$gpus")
fi

echo "demo: making about $pairs pairs"
python scripts/demo_data.py --output_dir "$demo/data" --pairs "$pairs"

echo "demo: training a tokenizer"
python scripts/train_tokenizer.py "$demo/data/train.parquet" --output_dir "$demo/tokenizer" --vocab_size 1600 --overwrite

echo "demo: training a model ($gpus GPUs seen)"
"${launch[@]}" train_low_mem.py train \
    --train_file="$demo/data/train.parquet" --validation_file="$demo/data/valid.parquet" \
    --tokenizer_dir="$demo/tokenizer" --model=tiny --output_dir="$demo/run" --overwrite=True \
    --epochs="$epochs" --batch_size_per_gpu=64 --gradient_accumulation_steps=1 \
    --optimizer=adamw_rms --warmup_steps=$((pairs * epochs / 2160)) --max_seq_len=32 --bleu_pairs=0

echo "demo: asking questions that it has not seen"
python scripts/demo_score.py "$demo/run/best" "$demo/data/test.parquet"

echo "demo: done in $SECONDS s after the installation; talk to it: .venv/bin/python scripts/chat.py $demo/run/best"
