"""HF directory -> Megatron directory: `megatron-rl convert hf-to-megatron` as a script."""

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
