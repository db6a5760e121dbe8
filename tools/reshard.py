"""Megatron checkpoint -> the same one in the chunks of another layout: `megatron-rl convert reshard` as a script."""

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "reshard", *sys.argv[1:]]))
