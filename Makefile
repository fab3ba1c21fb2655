# Every command of the project: `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# where it is set, every process of every test compiles the package again, 0.6 s, and pytest all tests, 2 s
unexport PYTHONDONTWRITEBYTECODE

# the first interpreter that runs and is 3.11 or 3.12 (a shim on PATH may be there and not run)
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
    && echo $$p && break; done)
endif
# PyPI's torch for Linux is the CUDA build: it works, but is gigabytes larger.  Name PyTorch's index of
# CPU wheels here, or configure pip with one, to get the small build
TORCH_INDEX ?=
# further flags for the demo: make demo ARGS="--num-rollout 5"
ARGS ?=
# the demo's model: make demo FAMILY=moonlight (docs/guide/models.md).  Another family than the recipe's has a
# directory of its own
FAMILY ?= qwen3_moe
TINY = runs/tiny$(patsubst %,-%,$(filter-out qwen3_moe,$(FAMILY)))
OF_FAMILY = $(if $(filter-out qwen3_moe,$(FAMILY)),--hf-checkpoint $(TINY)/model --prompt-data $(TINY)/prompts.jsonl)
# further arguments for pytest: make test PYTEST_ARGS="-k wire"
PYTEST_ARGS ?=

# tests by their marks (pyproject.toml): QUICK ones need one process.  GATE and REST start servers, ranks or whole
# jobs; further ones of those that are slow: make test-all ALSO="or ci"
QUICK := not e2e and not ranks and not slow and not long
GATE := gate and not slow and not long
ALSO ?=
REST := ((e2e or ranks) and not gate and not slow and not long) $(ALSO)
# the longest files first, so that no process is left with one of them at the end
GATE_TESTS := $(foreach folder,oracle e2e,$(sort $(shell grep -l 'mark\.gate' tests/$(folder)/test_*.py)))
LONGEST := tests/e2e/test_slurm.py tests/oracle tests/rehearsal \
    $(patsubst %,tests/e2e/test_%.py,durability colocated faults agents updates_in_flight lora_job)
REST_TESTS := $(LONGEST) $(filter-out $(LONGEST),$(sort $(wildcard tests/e2e/test_*.py))) tests/browser
# quick tests often wait: four at once keep two cores busy.  A job of two ranks keeps little more than one
# core busy: two files at once, each in one process
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet
BY_FILE := --numprocesses 2 --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
# errors alone, and on a terminal each package with its bar: the first time takes minutes
PIP := $(BIN)/python -m pip install $$([ -t 2 ] || echo -qq) --disable-pip-version-check --no-warn-conflicts
# bench.txt goes into .venv-trl, docs.txt into .venv-site
# gpu.txt is a lock for other machines
PINS := $(filter-out $(patsubst %,requirements/%.txt,bench docs gpu),$(sort $(wildcard requirements/*.txt)))
KEY := $(shell cat $(PINS) pyproject.toml | cksum | tr ' ' '-')-$(notdir $(PYTHON))
CPU_STAMP := .venv/.cpu-$(KEY)
DEV_STAMP := .venv/.dev-$(KEY)
BENCH_KEY := $(shell cat requirements/bench.txt requirements/constraints.txt | cksum | tr ' ' '-')-$(notdir $(PYTHON))
BENCH_STAMP := .venv-trl/.bench-$(BENCH_KEY)
SITE_STAMP := .venv-site/.site-$(shell cksum < requirements/docs.txt | tr ' ' '-')-$(notdir $(PYTHON))
PYTHON_VERSION := import sys; print(*sys.version_info[:2], sep=".")

.PHONY: help venv dev demo test test-all test-slow test-long lint format docs messages site verify bench bench-venv gpu-smoke lent lock clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(CPU_STAMP)  ## Make .venv with everything that runs on a CPU machine

dev: $(DEV_STAMP)  ## Add the tools of tests and style to .venv

# Make the venv again if it is of another Python or was copied from elsewhere.
$(CPU_STAMP):
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@wanted=$$($(PYTHON) -c '$(PYTHON_VERSION)'); \
	case "$$wanted" in 3.11|3.12) ;; *) echo "Python 3.11 or 3.12 is needed, $(PYTHON) is $$wanted"; exit 1;; esac; \
	found=$$($(BIN)/python -c '$(PYTHON_VERSION)' 2>/dev/null || echo none); \
	if [ "$$found" != "$$wanted" ] || ! head -3 $(BIN)/pip | grep -F "$(CURDIR)/$(BIN)/" >/dev/null; then \
	    echo "making .venv with $(PYTHON) ($$wanted)"; \
	    $(PYTHON) -m venv --clear .venv; \
	fi
	@echo "installing into .venv, 1 of 3: torch (the first time takes minutes; 2.6 GB on disk in all)"
	@# --no-deps: only torch comes from this index
	@$(PIP) --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c requirements/constraints.txt torch
	@echo "installing into .venv, 2 of 3: what r3train and SGLang import (some 150 packages, minutes)"
	@$(PIP) -c requirements/constraints.txt -r requirements/cpu.txt
	@echo "installing into .venv, 3 of 3: SGLang, Megatron-Core and r3train"
	@# megatron-core asks for Python 3.12, and its wheels are of 3.11 too
	@$(PIP) --no-deps --ignore-requires-python -r requirements/nodeps.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f .venv/.cpu-* .venv/.dev-*
	@touch $@

$(DEV_STAMP): $(CPU_STAMP)
	@echo "installing into .venv: tests and style"
	@$(PIP) -c requirements/constraints.txt -r requirements/dev.txt
	@rm -f .venv/.dev-*
	@touch $@

demo: venv  ## Train a tiny MoE on two CPU ranks with R3 on and proved (FAMILY= names its family, ARGS= adds flags)
	$(BIN)/r3train make-tiny-model --family $(FAMILY) --output $(TINY)
	OMP_NUM_THREADS=1 $(BIN)/r3train train --config tiny_cpu $(OF_FAMILY) $(ARGS)

test: lint  ## Run what every change must pass: style, layers, quick tests, the gate (PYTEST_ARGS= runs other tests)
ifneq ($(strip $(PYTEST_ARGS)),)
	$(PYTEST) --durations=10 $(PYTEST_ARGS)
else
	$(PYTEST) -m "$(QUICK)" --numprocesses 4
	$(PYTEST) -m "$(GATE)" --durations=10 $(BY_FILE) $(GATE_TESTS)
endif

test-all: dev  ## Run the tests that make test leaves out, but not slow ones (ALSO="or ci" adds what CI runs besides)
	$(PYTEST) -m "$(REST)" --durations=25 $(BY_FILE) $(REST_TESTS)

test-slow: dev  ## Run the tests that take minutes each
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-long: dev bench-venv  ## Run the longest commands of docs/ unchanged (an hour and a half)
	$(PYTEST) -m long $(PYTEST_ARGS)

lint: dev  ## Check style, layers and that generated pages and r3train.schema.json are up to date
	$(BIN)/black --check .
	$(BIN)/lint-imports
	$(BIN)/python docs/write_configuration.py --check
	$(BIN)/python docs/write_metrics.py --check
	$(BIN)/python docs/write_compare.py --check

format: dev  ## Format the code with black
	$(BIN)/black .

docs: dev  ## Write docs/reference/configuration.md, metrics.md, flags of compare.md and r3train.schema.json from the code
	$(BIN)/python docs/write_configuration.py
	$(BIN)/python docs/write_metrics.py
	$(BIN)/python docs/write_compare.py

messages: dev  ## Write what commands print into tests/messages/*.txt anew: read what changed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.messages.write

# mkdocs brings versions of its own: it never enters .venv
$(SITE_STAMP):
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv --clear .venv-site
	@.venv-site/bin/python -m pip install -qq --disable-pip-version-check -r requirements/docs.txt
	@touch $@

site: $(SITE_STAMP)  ## Build docs/ as a site with search in site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build  # --quiet would hide warnings from strict
	@echo "built: python -m http.server --directory site (search needs a server; the pages open without one)"

verify: venv  ## Prove R3 over topologies, and that planted bugs are caught
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.oracle.verify_planted --mutations

# TRL needs other packages and other pins: it never enters .venv
$(BENCH_STAMP):
	@echo "making .venv-trl: TRL, which the benchmark compares with (1.6 GB on disk)"
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv --clear .venv-trl
	@.venv-trl/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c requirements/constraints.txt torch
	@.venv-trl/bin/python -m pip install -qq --disable-pip-version-check \
	    -c requirements/constraints.txt -r requirements/bench.txt
	@touch $@

bench-venv: $(BENCH_STAMP)  ## Make .venv-trl with TRL, for the comparison in make bench

bench: venv bench-venv  ## Measure step, publish, start and rates into benchmarks/results.json and RESULTS.md (about 22 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run_all.py --write-results $(ARGS)

# of the environment in which it is called: the image's, or one that the pins for GPUs are in
gpu-smoke:  ## Run the first day on GPUs, step by step (docs/run/gpus.md; ARGS=--write-docs writes docs/run/gpu_results.md)
	python -m benchmarks.gpu_smoke $(ARGS)

lent: venv  ## Fetch wheels for a machine with one GPU and no network into downloads/lent, and print what to run there
	@$(BIN)/python -m tests.gpu.lent_wheels downloads/lent

lock:  ## Write requirements/gpu.txt anew from pyproject.toml, with uv
	uv pip compile pyproject.toml --extra gpu --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
	    --no-emit-package transformer-engine-cu12 --no-annotate --no-header --quiet --output-file requirements/gpu.txt

clean:  ## Remove .venv, caches and build output; runs/ stays
	rm -rf .venv .venv-trl .venv-site site build *.egg-info .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
