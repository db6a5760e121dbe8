"""Megatron directory or training checkpoint -> HF directory: `megatron-rl convert megatron-to-hf` as a script."""

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
