#!/usr/bin/env bash
# On one and on two GPUs: kill and resume with equal bits, five runs each, and what a save and deterministic mode cost.
#     bash bench/durable_gpu.sh [kills|default|saves]      writes docs/faults.md and JSON lines
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
worlds=${WORLDS:-1,2}
small=(--model tiny --dropout 0)
case ${1:-all} in kills | all)
    "$python" -m bench.kills --runs 10 --kills 2 --worlds "$worlds" --deterministic "${small[@]}"
    ;;& default | all) # how far the default mode is from that promise
    "$python" -m bench.kills --runs 4 --kills 1 --worlds "$worlds" "${small[@]}"
    ;;& saves | all)
    for processes in ${worlds//,/ }; do
        for pairs in 64 256; do
            "$python" -m bench.saves --model small --processes "$processes" --pairs "$pairs" --seconds 30 --every 5
            "$python" -m bench.saves --model small --processes "$processes" --pairs "$pairs" --seconds 15 --every 5 --deterministic
        done
    done
    ;;
esac
