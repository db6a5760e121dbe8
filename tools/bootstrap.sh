#!/usr/bin/env bash
# Builds .venv (CPU stack) when it is missing, half built, or older than what it is built from. Run again: does nothing.
# Environment: VENV (default .venv), PYTHON (an interpreter of Python 3.11).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
stamp="$venv/.complete"   # written last: without it, or with other contents, the environment does not count
inputs=(requirements/cpu.lock requirements/overrides.txt pyproject.toml setup.py tools/bootstrap.sh)
megatron="megatron-core==0.19.2"

fail() { echo "error: $*" >&2; exit 2; }

find_python() {   # prints a Python 3.11, or nothing
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null && uv python install 3.11 >&2; then uv python find 3.11; fi
}

torch_source() {   # uv options: a directory of wheels that pip is configured with, if torch's CPU wheel lies there; else torch's own index
    local links
    links="${PIP_FIND_LINKS:-} $("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)"
    for links in $links; do
        if [ -d "$links" ] && compgen -G "$links/torch-*cpu*.whl" >/dev/null; then
            echo "--find-links $links"
            return
        fi
    done
    echo "--torch-backend cpu"
}

# One build at a time: a second `make` waits here and then finds the work done.
exec 9>"${TMPDIR:-/tmp}/megatron_rl_bootstrap_$(pwd | cksum | cut -d ' ' -f 1).lock"
flock 9

wanted=$(cat "${inputs[@]}" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    touch "$stamp"
    exit 0
fi

rm -f "$stamp"
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    [ -n "$python" ] || fail "no Python 3.11 found; install python3.11 (with its venv module) or uv, or set PYTHON"
    echo "building $venv with $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
bin="$venv/bin"
"$bin/python" -m pip install --quiet uv
read -ra source <<< "$(torch_source)"
echo "installing $(grep -c == requirements/cpu.lock) packages (${source[*]})"
"$bin/uv" pip install --python "$bin/python" "${source[@]}" --overrides requirements/overrides.txt -r requirements/cpu.lock
# Its metadata asks for Python 3.12, its wheel is for 3.11 too; uv has no switch for that. Its dependencies are in the lock.
"$bin/python" -m pip install --quiet --no-deps --ignore-requires-python "$megatron"
"$bin/uv" pip install --python "$bin/python" --no-deps --editable .
"$bin/python" -c 'import megatron.core, megatron_rl' || fail "the packages are installed, but megatron.core does not import (see above)"
echo "$wanted" > "$stamp"
echo "$venv is complete"
