"""docs/config.md says what the config tables say."""

import importlib.util
from pathlib import Path

from megatron_rl.config.run import RLConfig
from megatron_rl.config.schema import keys, tables

ROOT = Path(__file__).parent.parent.parent


def test_the_reference_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "tools" / "config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "config.md").read_text() == module.reference(), "run `make docs`"


def test_keys_show_the_default_of_their_place():
    shown = {row.path: row.default for doc in tables(RLConfig) for row in keys(doc)}
    assert (shown["eval.sampling.temperature"], shown["train.sampling.temperature"]) == ("0.0", "1.0")
    assert (shown["sft.optim.lr"], shown["trainer.optim.lr"], shown["model.path"]) == ("1e-05", "1e-06", "required")
