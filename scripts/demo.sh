#!/usr/bin/env bash
# From a fresh machine to a small chat model and its score: makes .venv, pairs, a tokenizer and a model, and asks it.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/language.sh"

usage() {
    ! in_chinese || usage_zh
    cat >&2 <<'END'
usage: demo.sh      (no arguments)
Installs .venv where there is none, trains a small model on built-in questions and scores it on others.
Variables before the command change it:
  DEMO_PAIRS=12000  number of pairs, at least 280
  DEMO_EPOCHS=18    number of epochs
  DEMO_DIR=.demo    directory for the data and the run, relative to the project's root
END
    exit 2
}

usage_zh() {
    cat >&2 <<'END'
用法：demo.sh      （没有参数）
没有 .venv 时先安装，再用内置问答训练一个小模型，用没学过的问题给它打分。
写在命令前面的变量：
  DEMO_PAIRS=12000  问答对的数目，至少 280
  DEMO_EPOCHS=18    训练几轮
  DEMO_DIR=.demo    数据和训练的目录，相对于项目根目录
END
    exit 2
}

[[ $# == 0 ]] || usage
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
SECONDS=0
trap 'exit 130' INT # a training that is stopped by Ctrl+C exits with 0

pairs=${DEMO_PAIRS:-12000}
epochs=${DEMO_EPOCHS:-18}
demo=${DEMO_DIR:-.demo}

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
launch=(python)
if ((gpus > 1)); then
    launch=(accelerate launch --multi_gpu --num_processes "$gpus")
fi

tell "demo: making about $pairs pairs" "demo: 生成约 $pairs 个问答对"
python scripts/demo_data.py --output_dir "$demo/data" --pairs "$pairs"

tell "demo: training a tokenizer" "demo: 训练分词器"
python scripts/train_tokenizer.py "$demo/data/train.parquet" --output_dir "$demo/tokenizer" --vocab_size 1707 --overwrite

tell "demo: training a model ($gpus GPUs found)" "demo: 训练模型（找到 $gpus 块 GPU）"
"${launch[@]}" train_low_mem.py train \
    --train_file="$demo/data/train.parquet" --validation_file="$demo/data/valid.parquet" \
    --tokenizer_dir="$demo/tokenizer" --model=tiny --output_dir="$demo/run" --overwrite=True \
    --epochs="$epochs" --batch_size_per_gpu=64 --gradient_accumulation_steps=1 \
    --optimizer=adamw_rms --warmup_steps=$((pairs * epochs / 2160)) --max_seq_len=32 --bleu_pairs=0 --dropout=0

tell "demo: asking questions that the model has not seen" "demo: 问它没见过的问题"
python scripts/demo_score.py "$demo/run/best" "$demo/data/test.parquet"

talk=".venv/bin/python scripts/chat.py $demo/run/best"
tell "demo: done in $SECONDS s after the installation; talk to it: $talk" "demo: 安装之后共 $SECONDS 秒；和它对话：$talk"
