#!/usr/bin/env bash
# The whole demo: prepare, then SFT, RL, evaluation and export. Arguments go to `megatron-rl rl`: run.sh --trainer.steps 20
# Makes runs/demo anew each time, unless --resume is given.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || make venv
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}   # threads that wait must not hold a core: trainer and engine share them

mode=--clean
for word in "$@"; do
    case $word in --resume*) mode= ;; esac
done
if [ -n "$mode" ]; then
    rm -rf runs/demo-data
    "$python" -W ignore::SyntaxWarning examples/reverse_text/prepare.py --out runs/demo-data
fi
bash examples/pretrain_rl.sh examples/reverse_text/rl.toml "$@" $mode
