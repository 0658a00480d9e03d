# Every command makes .venv from the lock file first if it is missing or older than the lock file.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Nothing is compiled while installing; what is imported is, once, even where the environment says that it should not be.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := kernels model compress train serve pipeline bench tests
# One thread each, and one process more than a small machine has cores: some always wait for a server or a launch.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist worksteal
# Those whose numbers are larger with --all-trials, and the engine's: then all their rows run again with recorded graphs.
PROMISES := $(shell grep -l "tests.trials\|tests import trials\|make_engine\|mark.covering" tests/*/test_*.py)

.PHONY: install demo test test-cluster soak check machine-code lint types fast bench bench-gpu clean

install: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "potstill needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(INSTALLED)   ## distil a student from a real teacher, measure it, talk to it
	$(BIN)/potstill run configs/demo.yaml

test: $(INSTALLED)   ## the whole suite, the engine's through the path of CUDA graphs too
	$(PYTEST) --recorded-graphs tests

test-cluster: $(INSTALLED)   ## replicas on a Ray cluster of this machine; installs Ray, 80 MB, which all other tests do without
	$(BIN)/pip install --quiet --requirement requirements.lock --requirement requirements-ray.lock
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serve/test_cluster.py

soak: $(INSTALLED)   ## half an hour of mixed traffic with engines killed and stopped, then every promise in full numbers
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) --write
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --all-trials --recorded-graphs --timeout 1800 $(PROMISES)

check: lint types fast   ## what to run before a commit

machine-code: $(INSTALLED)   ## after a change of kernels: compile all for each GPU, and record what has been checked
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --compile-again --timeout 1800 -m machine_code tests

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(INSTALLED)
	$(BIN)/mypy

fast: $(INSTALLED)
	$(PYTEST) -m "not slow" tests

bench: $(INSTALLED)   ## beside transformers, llama.cpp, peft (VLLM=PEER/bin/python: and vLLM), and its own kernels; writes bench/results/
	$(BIN)/python -m bench.serve
	$(BIN)/python -m bench.serve --beside llama.cpp
	$(BIN)/python -m bench.serve --beside continuous
	$(if $(VLLM),$(BIN)/python -m bench.serve --beside vllm --peer $(VLLM))
	$(BIN)/python -m bench.serve.prefixes
	$(BIN)/python -m bench.serve.scheduler
	$(BIN)/python -m bench.train.distill
	$(BIN)/python -m bench.kernels.decode
	$(BIN)/python -m bench.train.qlora

bench-gpu: $(INSTALLED)   ## a first hour on a GPU, beside every peer that is installed; goes on where it stopped (TINY=1: a dry run)
	$(BIN)/python -m bench.gpu $(if $(TINY),--tiny)

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
