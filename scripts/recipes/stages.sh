# Sourced by the recipes, which set `recipe`, `model`, `kind` and `vocab_size`: the stages from files to a model.
# A stage that is done is skipped, and one that was stopped goes on, when a recipe is run again.

source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../launch.sh"
trap 'exit 130' INT # a training that Ctrl+C stops exits with 0

usage() {
    ! in_chinese || usage_zh
    cat >&2 <<END
usage: $recipe.sh --pairs=FILE[,FILE] --sft=FILE[,FILE] [--text=FILE[,FILE]] [--out=DIR] [--any_field=value ...]
  --pairs   pairs or conversations to pre-train on      --text  plain text, learnt before them
  --sft     conversations to fine-tune on               --out   directory of the result (model_save/$recipe)
  --members=N        train N models on the pairs, and from their predictions the one that is kept (1: only that one)
  --preferences=N    then let it answer N of these conversations, and prefer their own responses (DPO)
  --seed=N           of all trainings (23333); the members have the next ones
  --validation_share=0.01    of each kind of file is kept to validate; little data needs a larger share
  --any_field=value  options of train_low_mem.py train for every training
NUM_PROCESSES=2 before the command starts that many processes instead of one for each visible GPU.
Run it again to go on where it stopped.
END
    exit 2
}

usage_zh() {
    cat >&2 <<END
用法：$recipe.sh --pairs=文件[,文件] --sft=文件[,文件] [--text=文件[,文件]] [--out=目录] [--any_field=value ...]
  --pairs   预训练用的问答对或对话      --text  纯文本，在它们之前学
  --sft     微调用的对话                --out   结果的目录（model_save/$recipe）
  --members=N        先用问答对训练 N 个模型，保留的模型再学它们的预测（1：只训练这一个）
  --preferences=N    然后让模型回答其中 N 个对话，学习偏好原来的回答（DPO）
  --seed=N           每次训练的随机种子（23333）；各成员依次用后面的几个
  --validation_share=0.01    每种文件留作验证的比例；数据少时要大一些
  --any_field=value  train_low_mem.py train 的选项，用于每次训练
前面写 NUM_PROCESSES=2 就启动两个进程；不写时每块可见的 GPU 一个。
再运行一次，就从停下的地方继续。
END
    exit 2
}

# Reads the options of the usage; what else is typed goes to every training.
read_words() {
    local word rest=()
    text='' pairs='' sft='' members=1 preferences=0 seed=23333 validation_share=0.01 out=model_save/$recipe
    for word in "$@"; do
        case $word in
        --text=* | --pairs=* | --sft=* | --members=* | --preferences=* | --seed=* | --validation_share=* | --out=*)
            printf -v "$(cut -c3- <<<"${word%%=*}")" %s "${word#*=}"
            ;;
        --help) usage ;;
        *) rest+=("$word") ;;
        esac
    done
    [[ -n $pairs ]] || refuse "--pairs=FILE is missing: the pairs or conversations to pre-train on"
    [[ -n $sft ]] || refuse "--sft=FILE is missing: the conversations to fine-tune on"
    is_positive "$members" || refuse "--members=$members: how many models are trained on the pairs, a whole number, from 1"
    [[ $seed =~ ^[0-9]{1,9}$ ]] || refuse "--seed=$seed: the seed of all trainings, a whole number"
    [[ $preferences == 0 ]] || is_positive "$preferences" ||
        refuse "--preferences=$preferences: how many conversations the model answers, a whole number; 0: none"
    read_options "${rest[@]}"
    text=$(absolute "$text") pairs=$(absolute "$pairs") sft=$(absolute "$sft") out=$(absolute "$out")
    cd -- "$root"
    python=python3
    [[ ! -x .venv/bin/python ]] || python=.venv/bin/python
    check_packages "$python"
}

# The paths of a list with commas, from the user's directory.
absolute() {
    local path paths=()
    IFS=, read -ra paths <<<"$1"
    for path in "${paths[@]}"; do
        [[ $path == /* ]] || path=$PWD/$path
        printf %s "${comma:-}$path"
        local comma=,
    done
}

# Says $1, or $2 to people who read Chinese.
say() {
    ! in_chinese || set -- "$2"
    printf '%s: %s\n' "$recipe" "$1"
}

# Cleans the files in $2 into $out/data/$1.parquet, and a share of them into $1_valid.parquet; further words are options.
prepare() {
    local name=$1 files=()
    [[ -n $2 && ! -e $out/data/$1.parquet ]] || return 0
    say "prepares $1" "整理 $1"
    mkdir -p "$out/data"
    IFS=, read -ra files <<<"$2"
    shift 2
    "$python" scripts/prepare_data.py "${files[@]}" --output "$out/data/$name.parquet" \
        --validation_output "$out/data/${name}_valid.parquet" --validation_share="$validation_share" --overwrite "$@"
}

# What all stages need: the files that were named, cleaned, and a tokenizer of their texts.
prepare_all() {
    prepare text "$text" --max_chars=1000000 # a document becomes many chunks
    prepare pairs "$pairs"
    prepare sft "$sft"
    make_tokenizer
}

make_tokenizer() {
    [[ ! -e $out/tokenizer/tokenizer.json ]] || return 0
    say "trains a tokenizer" "训练分词器"
    "$python" scripts/train_tokenizer.py "$out"/data/*.parquet --output_dir "$out/tokenizer" \
        --kind="$kind" --vocab_size "$vocab_size" --overwrite
}

# A run in $out/$1 on the files $2 of $out/data, FILE[,FILE:WEIGHT], judged on what is kept of the first, with these
# further options; ends the recipe if it was stopped.
train_stage() {
    local run=$out/$1 data=$out/data/${2//,/,$out/data/} first=$out/data/${2%%,*} word stage=()
    shift 2
    ! is_finished "$run" || return 0
    for word in "$@"; do # a number of steps that was typed stands in place of the recipe's epochs
        [[ $word == --epochs=* && " ${options[*]}" == *" --max_steps="* ]] || stage+=("$word")
    done
    say "trains $run" "训练 $run"
    (start_training --seed="$seed" --train_file="$data" --validation_file="${first%.*}_valid.${first##*.}" --output_dir="$run" "${stage[@]}")
    is_finished "$run" || {
        say "stopped in $run: type the same command to go on" "停在 $run：再输入同一条命令就继续"
        exit 1
    }
}

# The weight at which an epoch reads 1.5 rows of $out/data/$2.parquet for each row of $1.parquet; at most 1.
weight_beside() {
    "$python" - "$out/data/$1.parquet" "$out/data/$2.parquet" <<'END'
import sys
from pyarrow.parquet import ParquetFile

few, many = (ParquetFile(path).metadata.num_rows for path in sys.argv[1:])
print(f"{min(1.5 * few / many, 1):.3g}")
END
}

# Muon's learning rate for $2 epochs of $out/data/$1.parquet at $3 pairs a step: $4, or less where so many steps would not
# stay steady.
steady_rate() {
    "$python" - "$out/data/$1.parquet" "${@:2}" <<'END'
import sys
from pyarrow.parquet import ParquetFile
from model.train.lr_schedule import steady_peak

epochs, batch, highest = map(float, sys.argv[2:])
steps = ParquetFile(sys.argv[1]).metadata.num_rows * epochs / batch
print(f"{min(steady_peak('cosine', steps), highest):.3g}")
END
}

is_finished() {
    [[ -e $1/metrics.jsonl ]] && grep '"kind": *"stop"' "$1/metrics.jsonl" | tail -n 1 | grep -q '"finished"'
}

# The run $1 on the pairs, with these further options; with members it also learns from so many runs of other seeds.
pairs_stage() {
    local run=$1 member teachers=()
    shift
    for ((member = 1; members > 1 && member <= members; member++)); do
        seed=$((10#$seed + member)) train_stage "${run}_member_$member" pairs.parquet "$@"
        teachers+=("$out/${run}_member_$member/best")
    done
    ((members == 1)) || set -- "$@" --teacher="$(IFS=,; echo "${teachers[*]}")" --distill_weight=0.7
    train_stage "$run" pairs.parquet "$@"
    runs+=("$out/$run")
}

# The run $1 learns to prefer the responses of its data to its own, in $out/$2, with these further options.
prefer_stage() {
    local name
    [[ $preferences != 0 ]] || return 0
    for name in '' _valid; do
        [[ ! -e $out/data/preferences$name.jsonl ]] || continue
        "$python" scripts/make_preferences.py "$out/$1" "$out/data/sft$name.parquet" --rows "$preferences" \
            --output "$out/data/preferences$name.jsonl"
    done
    train_stage "$2" preferences.jsonl --objective=dpo --finetune_from_ckp_file="$out/$1/best" --epochs=1 "${@:3}" \
        --global_batch_size=16 --learn_rate=0.0005 --sft_weight=1.5 --rejected_loops_weight=120
    runs+=("$out/$2")
}

# What the runs came to, and twenty answers of those that learnt to answer.
show_results() {
    local run models=()
    "$python" scripts/check_training_progress.py "$@"
    for run in "$@"; do
        [[ $run == */1_text ]] || models+=("$run/best")
    done
    "$python" train_low_mem.py test "${models[@]}" --test_file="$out/data/sft_valid.parquet" --show=20
    say "talk to it: $python scripts/chat.py ${models[-1]}" "和它对话：$python scripts/chat.py ${models[-1]}"
}
