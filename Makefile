# `make` alone lists the targets. Everything runs in .venv, which is built when it is missing or the lock has changed.
.DEFAULT_GOAL := help
.PHONY: help venv te demo test test-fast test-long lint lock docs clean
SHELL := /bin/bash
PYTHON := .venv/bin/python
STAMP := .venv/.complete
TE_STAMP := .te/.complete
PYTEST := $(PYTHON) -m pytest
ARGS ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## build .venv from requirements/cpu.lock

$(STAMP): requirements/cpu.lock requirements/overrides.txt pyproject.toml setup.py tools/bootstrap.sh
	tools/bootstrap.sh

te: $(TE_STAMP) ## .te: TransformerEngine's Python layer, for the tests of the GPU path

$(TE_STAMP): $(STAMP) requirements/te.txt tools/te_python.sh
	tools/te_python.sh

demo: $(STAMP) ## SFT warm-up, RL, evaluation, export and plots on a tiny model (ARGS="--trainer.steps 20")
	examples/reverse_text/run.sh $(ARGS)

test: $(STAMP) $(TE_STAMP) ## the whole test suite
	$(PYTEST) -m "not long" --timeout 900 $(ARGS)

test-fast: $(STAMP) ## without engines and multi-rank jobs
	$(PYTEST) -m "not long and not engine and not ranks" --timeout 300 $(ARGS)

test-long: $(STAMP) ## kill matrix, soaks, studies
	$(PYTEST) -m long --timeout 7200 $(ARGS)

lint: $(STAMP) ## ruff, shell syntax, hadolint
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	for script in tools/*.sh examples/*.sh examples/*/*.sh .ci/run; do bash -n "$$script" || exit 1; done
	.venv/bin/hadolint Dockerfile

docs: $(STAMP) ## docs/config.md from the config tables
	$(PYTHON) tools/config_reference.py > docs/config.md

lock: $(STAMP) ## requirements/cpu.lock from requirements/cpu.in
	tools/lock.sh

clean: ## caches; runs/, .venv and .te stay
	find . \( -path ./.venv -o -path ./.te \) -prune -o -type d \( -name __pycache__ -o -name .pytest_cache -o -name .ruff_cache -o -name '*.egg-info' \) -print0 | xargs -0 rm -rf
	rm -rf build
