"""Makes tests/ importable: ranks.py starts ranks, tiny_models.py writes HF fixtures."""
