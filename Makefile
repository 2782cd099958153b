# make demo    a real model, generating through PagedCache: exactness, memory and speed, in results/demo/
# make test    lint, types and all tests; with TRANSFORMERS=5.20.0 the tests alone, on that release
# make lint    ruff and mypy
# make clean   remove the virtual environments and everything built
#
# Each virtual environment is made once, and again only when what decides about it (SOURCES) changes. The demo
# installs what it needs, in the pinned versions; the tests add the rest. Pip would compile everything, file by file,
# before the first line runs: the demo leaves that to the imports, the tests use all cores.

PYTHON ?= python3
TRANSFORMERS ?=
PYTEST_ARGS ?=

VENV := .venv$(if $(TRANSFORMERS),-$(TRANSFORMERS))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := .venv/.demo-ready
SOURCES := pyproject.toml requirements-dev.txt setup.py hf_kvcache/attention/rows.c
PIP := python -m pip --disable-pip-version-check install --no-compile

.PHONY: demo test lint clean
.DEFAULT_GOAL := demo

demo: $(DEMO_READY)
	.venv/bin/hf-kvcache demo

# Ruff and mypy read the same source whatever transformers the tests run on: once is enough.
test: $(READY) $(if $(TRANSFORMERS),,lint)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(DEMO_READY): $(SOURCES)
	$(PYTHON) -m venv .venv
	.venv/bin/$(PIP) --constraint requirements-dev.txt --editable '.[eval]'
	touch $@

$(READY): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TRANSFORMERS),s/^transformers==.*/transformers==$(TRANSFORMERS)/)' requirements-dev.txt > $(VENV)/requirements.txt
	$(BIN)/$(PIP) -r $(VENV)/requirements.txt
	$(BIN)/$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compileall.log 2>&1 || true  # some files are for other Pythons
	touch $@

clean:
	rm -rf .venv .venv-* build dist results *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
