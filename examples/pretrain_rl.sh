#!/bin/sh
''':'
# To a shell, this part is the program and the rest a here-document; to Python, this part is a string.
here=$(cd "$(dirname "$0")" && pwd)
python="$here/../.venv/bin/python"
[ -x "$python" ] || python=$(command -v python3 || command -v python) || { echo "error: no Python; run make venv" >&2; exit 2; }
exec "$python" "$here/$(basename "$0")" "$@"
: <<'# the end' #'''
"""An RL run from config files, locally or as the ranks of torchrun. Words that end in .toml are config files.

bash examples/pretrain_rl.sh CONFIG.toml... [--key value]
torchrun --no-python --nproc-per-node 2 examples/pretrain_rl.sh CONFIG.toml... [--key value]
torchrun --nproc-per-node 2 examples/pretrain_rl.sh CONFIG.toml... [--key value]
"""

import sys


def arguments(words):
    """`a.toml b.toml --key value` -> `rl @ a.toml @ b.toml --key value`. A .toml that follows a --key is that key's value."""
    out, previous = ["rl"], ""
    for word in words:
        is_config = word.endswith(".toml") and previous != "@" and (not previous.startswith("--") or "=" in previous)
        out += ["@", word] if is_config else [word]
        previous = word
    return out


if __name__ == "__main__":
    try:
        from megatron_rl.cli import main
    except ImportError as error:
        sys.exit(f"error: {error}; `make venv` builds the environment, and .venv/bin/torchrun uses it")
    sys.exit(main(arguments(sys.argv[1:])))
# the end
