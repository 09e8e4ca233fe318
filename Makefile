# A fresh machine needs Python 3.11 or newer and make; every target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: help install quickstart test lint clean

help:
	@echo "make quickstart   train on built-in identities, evaluate on unseen ones, search; writes quickstart/report.html"
	@echo "make test         all tests"
	@echo "make lint         ruff and mypy --strict"
	@echo "make install      the virtual environment in $(VENV)"

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'plsc needs Python 3.11 or newer; set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps milvus-lite  # its faiss-cpu would overwrite faiss-gpu's files
	touch $(STAMP)

quickstart: install
	$(VENV)/bin/plsc quickstart --out quickstart

test: install
	$(VENV)/bin/python -m pytest

lint: install
	$(VENV)/bin/ruff check --no-cache .  # a cached verdict of a moved module outlives the move
	$(VENV)/bin/ruff format --no-cache --check --quiet .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info quickstart
