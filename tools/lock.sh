#!/usr/bin/env bash
# Pins requirements/cpu.in to requirements/cpu.lock with the tools of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
source=()
for links in ${PIP_FIND_LINKS:-} $(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true); do
    if compgen -G "$links/torch-*cpu*.whl" >/dev/null; then source=(--find-links "$links"); fi
done
[ ${#source[@]} -gt 0 ] || source=(--torch-backend cpu)
.venv/bin/uv pip compile --python .venv/bin/python "${source[@]}" --overrides requirements/overrides.txt \
    --no-header --no-annotate --no-emit-index-url --no-emit-find-links -o requirements/cpu.lock requirements/cpu.in
