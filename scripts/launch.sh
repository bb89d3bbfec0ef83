# Sourced by run_train.sh and train_sft_custom.sh, which define `usage`: reads options, counts GPUs, starts a training.

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
source "$root/scripts/language.sh"

# What the user typed, for the run to say when it is stopped.
CHAT_COMMAND=$(printf '%q ' ${NUM_PROCESSES:+"NUM_PROCESSES=$NUM_PROCESSES"} "$0" "$@")
export CHAT_COMMAND

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

# Prints the usage and what is wrong, and ends the script.
refuse() {
    (usage) || printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

# Ends the script if this Python lacks what every run imports.
check_packages() {
    "$1" -c 'import sys, importlib.util as u; sys.exit(not (u.find_spec("torch") and u.find_spec("fire")))' && return
    printf '%s: %s\n' "${0##*/}" "$1 lacks the packages of this project: type bash scripts/demo.sh, which makes .venv, then source .venv/bin/activate" >&2
    exit 2
}

# Puts the user's arguments into `options`; makes relative paths relative to the user's directory.
read_options() {
    local word here=$PWD/
    [[ ! $PWD -ef $root ]] || here=
    options=()
    for word in "$@"; do
        case $word in
        --help) usage ;;
        --*[-_]file=[!/]* | --*[-_]dir=[!/]* | --model=[!/]*.json) options+=("${word%%=*}=$here${word#*=}") ;;
        --*) options+=("$word") ;;
        *) refuse "cannot read ${word@Q}: options are written --name=value" ;;
        esac
    done
}

# Replaces this shell by a training with these arguments and the user's `options`: one process for each visible GPU, or
# one on the CPU where there is no GPU.
start_training() {
    local num_processes=${NUM_PROCESSES:-$(count_gpus)} launch=(python3)
    [[ -n ${NUM_PROCESSES:-} || $num_processes != 0 ]] || num_processes=1
    is_positive "$num_processes" || refuse "NUM_PROCESSES=${num_processes@Q}: it must be a positive integer"
    cd -- "$root"
    if [[ -x .venv/bin/python ]]; then
        launch=(.venv/bin/python)
    else
        check_packages python3
    fi
    if ((10#$num_processes > 1)); then
        launch+=(-m torch.distributed.run --standalone --nproc_per_node "$num_processes")
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's own default, of which it warns
    fi
    launch+=(./train_low_mem.py train "$@" --is_keep_training=auto "${options[@]}")
    printf '%q ' "${launch[@]}"
    printf '\n'
    exec "${launch[@]}"
}
