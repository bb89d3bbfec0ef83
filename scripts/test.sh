#!/usr/bin/env bash
# Makes .venv where there is none and runs the test suite; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
python -m pytest -n 2 --dist loadfile "$@"  # most tests wait for processes of their own
