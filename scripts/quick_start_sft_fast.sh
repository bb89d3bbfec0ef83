#!/usr/bin/env bash
# Fine-tune with the fast preset, 16 pairs a GPU: train_sft_custom.sh with its usual N.
set -euo pipefail

exec bash "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/train_sft_custom.sh" 16 "$@"
