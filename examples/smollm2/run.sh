#!/usr/bin/env bash
# Prepares SmolLM2-135M-Instruct once, then three steps of RL. Arguments go to `megatron-rl rl`: run.sh --trainer.steps 10
# Makes runs/smollm2 anew each time, unless --resume is given.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || make venv
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}   # threads that wait must not hold a core: trainer and engine share them

mode=--clean
for word in "$@"; do
    case $word in --resume*) mode= ;; esac
done
[ -d runs/smollm2-data ] || "$python" -W ignore::SyntaxWarning examples/smollm2/prepare.py --out runs/smollm2-data
bash examples/pretrain_rl.sh examples/smollm2/rl.toml "$@" $mode
