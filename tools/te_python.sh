#!/usr/bin/env bash
# Installs requirements/te.txt into .te, beside .venv and never on its path: Megatron-Core changes its behaviour where it can import
# transformer_engine. Tests of that path run in processes of their own with PYTHONPATH=.te. Run again: does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.te/.complete   # written last
exec 9>"${TMPDIR:-/tmp}/megatron_rl_te_$(pwd | cksum | cut -d ' ' -f 1).lock"
flock 9

wanted=$(cat requirements/te.txt tools/te_python.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    touch "$stamp"
    exit 0
fi
rm -rf .te
.venv/bin/uv pip install --python .venv/bin/python --target .te --no-deps -r requirements/te.txt
echo "$wanted" > "$stamp"
echo ".te is complete"
