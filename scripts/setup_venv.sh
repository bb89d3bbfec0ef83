# Sourced by demo.sh and test.sh: moves to the project's root, installs what is missing in .venv and puts it first on
# PATH. The stamp in .venv is written last and holds a hash of the files that list the packages. A .venv without a stamp
# was interrupted while it was installed: pip cannot tell which of its packages are complete, so it is made again.

source "$(dirname "${BASH_SOURCE[0]}")/language.sh"

find_python() {
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    echo "set-up: none of python3.13, python3.12, python3.11, python3 is Python >= 3.11 with the venv module:" \
        "install one (on Debian and Ubuntu: apt-get install python3 python3-venv)" >&2
    return 1
}

inputs_hash() {
    cat pyproject.toml constraints.txt |
        .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

set_up() {
    local python stamp=.venv/installed.sha256
    if [[ ! -s $stamp ]] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        python=$(find_python)
        tell "set-up: making .venv with $("$python" --version)" "安装：用 $("$python" --version) 建立 .venv"
        "$python" -m venv --clear .venv
    elif [[ $(<"$stamp") == $(inputs_hash) ]]; then
        tell "set-up: .venv is up to date" "安装：.venv 已是最新"
        return
    fi
    rm -f "$stamp"
    tell "set-up: installing torch (the largest download)" "安装：torch（下载最大的一个）"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    tell "set-up: installing the project and its other packages" "安装：本项目和其他依赖"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
    inputs_hash >"$stamp"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
set_up
export PATH="$PWD/.venv/bin:$PATH"
