#!/usr/bin/env bash
# Fine-tune with the fast preset and 16 pairs per GPU: train_sft_custom.sh with its default N.
set -euo pipefail

exec bash "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/train_sft_custom.sh" 16 "$@"
