#!/usr/bin/env bash
# Makes .venv where there is none and runs the test suite.
set -euo pipefail

usage() {
    cat >&2 <<'END'
usage: test.sh [pytest's arguments ...]
Installs .venv where there is none and runs the test suite, for example: test.sh tests/nn -k attention
pytest's own arguments: .venv/bin/python -m pytest --help
END
    exit 2
}

case ${1-} in -h | --help) usage ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
# More workers than cores, because many tests wait for processes of their own, and one thread in each.
OMP_NUM_THREADS=1 python -m pytest -n 3 --dist worksteal "$@"
