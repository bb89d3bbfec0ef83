# Sourced by the recipes, which set `model`, `kind`, `vocab_size` and define `usage`: the stages from files to a model.
# A stage that is done is skipped, and one that was stopped goes on, when a recipe is run again.

source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../launch.sh"
trap 'exit 130' INT # a training that Ctrl+C stops exits with 0

# Reads --text, --pairs, --sft, --preferences and --out; what else is typed goes to every training.
read_words() {
    local word rest=()
    text='' pairs='' sft='' preferences=0 out=model_save/$recipe
    for word in "$@"; do
        case $word in
        --text=* | --pairs=* | --sft=* | --preferences=* | --out=*) printf -v "$(cut -c3- <<<"${word%%=*}")" %s "${word#*=}" ;;
        *) rest+=("$word") ;;
        esac
    done
    [[ -n $pairs ]] || refuse "--pairs=FILE is missing: the pairs or conversations to pre-train on"
    [[ -n $sft ]] || refuse "--sft=FILE is missing: the conversations to fine-tune on"
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

say() {
    printf '%s: %s\n' "$recipe" "$1"
}

# Cleans the files in $2 into $out/data/$1.parquet, and a share of them into $1_valid.parquet; further words are options.
prepare() {
    local name=$1 files=()
    [[ -n $2 && ! -e $out/data/$1.parquet ]] || return 0
    say "prepares $1"
    mkdir -p "$out/data"
    IFS=, read -ra files <<<"$2"
    shift 2
    "$python" scripts/prepare_data.py "${files[@]}" --output "$out/data/$name.parquet" \
        --validation_output "$out/data/${name}_valid.parquet" --overwrite "$@"
}

make_tokenizer() {
    [[ ! -e $out/tokenizer/tokenizer.json ]] || return 0
    say "trains a tokenizer"
    "$python" scripts/train_tokenizer.py "$out"/data/*.parquet --output_dir "$out/tokenizer" \
        --kind="$kind" --vocab_size "$vocab_size" --overwrite
}

# A run in $out/$1 on the file $2 of $out/data, with these further options; ends the recipe if it was stopped.
train_stage() {
    local run=$out/$1 data=$out/data/$2
    shift 2
    ! is_finished "$run" || return 0
    say "trains $run"
    (start_training --train_file="$data" --validation_file="${data%.*}_valid.${data##*.}" --output_dir="$run" "$@")
    is_finished "$run" || {
        say "stopped in $run: type the same command to go on"
        exit 1
    }
}

is_finished() {
    [[ -e $1/metrics.jsonl ]] && grep '"kind": *"stop"' "$1/metrics.jsonl" | tail -n 1 | grep -q '"finished"'
}

# The run $1 learns to prefer the responses of its data to its own, in $out/$2.
prefer_stage() {
    local name
    [[ $preferences != 0 ]] || return 0
    for name in '' _valid; do
        [[ ! -e $out/data/preferences$name.jsonl ]] || continue
        "$python" scripts/make_preferences.py "$out/$1" "$out/data/sft$name.parquet" --rows "$preferences" \
            --output "$out/data/preferences$name.jsonl"
    done
    train_stage "$2" preferences.jsonl --objective=dpo --finetune_from_ckp_file="$out/$1/best" --epochs=1
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
    say "talk to it: $python scripts/chat.py ${models[-1]}"
}
