# A fresh machine needs Python 3.11 or newer and make; every target sets up its virtual environment by itself.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
OLDEST_TORCH := 2.11.0
STAMP := $(VENV)/.installed
# Processes that tests run in: one for each core. Each takes whole files of tests, and starts ranks of its own. One that a
# hanging test ends is not replaced: the run ends, and names the test.
PROCESSES ?= $(shell nproc 2>/dev/null || echo 1)
# Hundreds of processes import the same modules: they keep what they compile, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := -m pytest $(if $(filter-out 1,$(PROCESSES)),--numprocesses $(PROCESSES) \
	--dist loadfile --no-loadscope-reorder --max-worker-restart 0)

.PHONY: help install lock quickstart test test-all test-oldest fuzz gpu-day lint docs clean

help:
	@echo "make quickstart   train on drawn identities, evaluate on unseen ones, fill a gallery; writes quickstart/report.html"
	@echo "make test         all but live and slow tests, in about eight minutes on two cores"
	@echo "make test-all     these and the second ring, live and slow tests: everything, in about an hour on two cores"
	@echo "make test-oldest  all tests with torch $(OLDEST_TORCH), the oldest supported, in $(OLDEST)"
	@echo "make fuzz         fuzz targets of readers and routes; SECONDS=300 TARGET=rec SEED=7; inputs that fail go to fuzz-failures/"
	@echo "make gpu-day      on a machine with a GPU: examination, GPU tests, benchmarks; into gpu-day/, within two hours; ARGS='--again tests'"
	@echo "make lint         ruff (rules and layout) and mypy --strict"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make install      the virtual environment in $(VENV), with the versions of constraints.txt"
	@echo "make lock         write constraints.txt anew from the newest versions that pyproject.toml admits"

install: $(STAMP)

# $(call create_env,FOLDER,CONSTRAINTS): an environment with plsc, editable, and everything that its tests need.
define create_env
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'plsc needs Python 3.11 or newer; set PYTHON=')"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --editable '.[all,dev]' --constraint $(2) || { \
		echo "constraints.txt names versions that this package index lacks: installing the newest that pyproject.toml admits" >&2; \
		$(1)/bin/python -m pip install --quiet --editable '.[all,dev]' $(3); }
	touch $(1)/.installed
endef

$(STAMP): pyproject.toml constraints.txt
	$(call create_env,$(VENV),constraints.txt)

$(OLDEST)/.installed: pyproject.toml constraints.txt
	mkdir -p $(OLDEST)
	{ grep -v -E '^torch(vision)?==' constraints.txt; echo "torch==$(OLDEST_TORCH)"; } > $(OLDEST)/constraints.txt
	$(call create_env,$(OLDEST),$(OLDEST)/constraints.txt,torch==$(OLDEST_TORCH))

lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet '.[all,dev]'
	{ echo "# The versions that 'make install' installs; 'make lock' writes this file anew. What torch pins itself is left out."; \
		build/lock/bin/python -m pip freeze | grep -v -E '^(nvidia-[^m]|cuda-|triton==|plsc-torch)'; } > constraints.txt
	rm -rf build/lock

quickstart: install
	$(VENV)/bin/plsc quickstart --out quickstart

test: install
	$(VENV)/bin/python $(PYTEST) -m "not exhaustive"

test-all: test
	$(VENV)/bin/python $(PYTEST) -m exhaustive

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python $(PYTEST)

SECONDS ?= 300
fuzz: install
	$(VENV)/bin/python tests/fuzz --seconds $(SECONDS) $(if $(TARGET),--target '$(TARGET)') $(if $(SEED),--seed $(SEED))

# A GPU's machine may reach no package index: an interpreter that has torch is used as it is, with these sources.
gpu-day:
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then $(PYTHON) benchmarks/gpu_day.py $(ARGS); \
		else $(MAKE) --no-print-directory install && $(VENV)/bin/python benchmarks/gpu_day.py $(ARGS); fi

lint: install
	$(VENV)/bin/ruff check --no-cache .  # a cached verdict of a moved module outlives the move
	$(VENV)/bin/ruff format --no-cache --check --quiet .
	$(VENV)/bin/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info quickstart
