"""Makes tests/ importable: ranks.py starts ranks, tiny_models.py writes HF fixtures, engines.py starts vLLM."""

from engines import engine, engine_models  # noqa: F401
