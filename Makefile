# Every target does its own set-up: on a fresh machine with Python >= 3.11, git and make, `make quickstart` is enough.
# Another interpreter: make setup PYTHON=python3.12

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lint test quickstart smoke clean

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The uv that is installed into .venv where PATH has none.
UV_VERSION := 0.13.9

help: ## list the targets
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## create .venv and install Fovea with the tested versions (once)

# The stamp is written last: an interrupted installation starts again, a finished one is left alone until
# pyproject.toml or constraints.txt changes. Bytecode is compiled at installation because an environment with
# PYTHONDONTWRITEBYTECODE would otherwise compile every library again in every process (20 s instead of 7).
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found; Fovea needs Python >= 3.11: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: %s is Python %d.%d; Fovea needs Python >= 3.11: make setup PYTHON=/path/to/python3.11" % (sys.executable, v[0], v[1]))'
	@if uv=$$(command -v uv); then \
	  [ -x $(PY) ] || "$$uv" venv --quiet --python "$$(command -v $(PYTHON))" $(VENV); \
	else \
	  [ -x $(PY) ] || $(PYTHON) -m venv $(VENV) || { \
	    echo "error: $(PYTHON) -m venv failed; on Debian or Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }; \
	  uv=$(VENV)/bin/uv; \
	  [ -x "$$uv" ] || $(PY) -m pip install --quiet uv==$(UV_VERSION); \
	fi; \
	"$$uv" pip install --python $(PY) --compile-bytecode -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

lint: $(STAMP) ## ruff (rules and format) and mypy (strict on fovea/)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: $(STAMP) ## run the test suite on two processes (the slow ones: pytest -m slow)
	$(PY) -m pytest -n 2 -m "not slow"

quickstart: $(STAMP) ## world -> coarse CLIP -> Alpha-CLIP -> regions -> reweight -> report
	$(PY) scripts/reproduce.py --row quickstart

smoke: $(STAMP) ## the quickstart in miniature (at most 90 s)
	$(PY) scripts/reproduce.py --row smoke

clean: ## remove caches and runs/ (keeps .venv and data/)
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
