"""Runs a function in a process that can import TransformerEngine's Python layer; this one never does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import run_ranks

HERE = Path(__file__).parent
TE = HERE.parent.parent / ".te"


@pytest.fixture(scope="session")
def in_te() -> Callable[..., Any]:
    """`in_te("te_parity_cases.py:main", [args])`: what the function of that file here returns."""
    if not (TE / ".complete").exists():
        pytest.fail(f"{TE} is not built: run `make te`", pytrace=False)

    def run(target: str, args: list[str] | None = None) -> Any:
        path = os.pathsep.join(filter(None, [str(TE), str(HERE), os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, PYTHONPATH=path, TORCH_COMPILE_DISABLE="1"):
            return run_ranks(str(HERE / target), 1, args)[0]

    return run
