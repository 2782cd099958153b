# make demo    a real model, generating through PagedCache: exactness, memory and speed, in results/demo/
# make test    lint, types and all tests; with TRANSFORMERS=5.20.0 the tests alone, on that release
# make lint    ruff and mypy
# make clean   remove the virtual environments and everything built
#
# Each virtual environment is made once, and again only when pyproject.toml or requirements-dev.txt change.

PYTHON ?= python3
TRANSFORMERS ?=
PYTEST_ARGS ?=

VENV := .venv$(if $(TRANSFORMERS),-$(TRANSFORMERS))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/hf-kvcache demo

# Ruff and mypy read the same source whatever transformers the tests run on: once is enough.
test: $(READY) $(if $(TRANSFORMERS),,lint)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TRANSFORMERS),s/^transformers==.*/transformers==$(TRANSFORMERS)/)' requirements-dev.txt > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r $(VENV)/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv .venv-* build dist results *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
