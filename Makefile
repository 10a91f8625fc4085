# On a fresh machine, `make demo` and `make test` need only Python 3.11 or newer. Both targets build
# .venv once; a stamp file marks the finished build.

# The first interpreter that runs; a shim of a version manager may exist but fail.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    if $$p -c '' >/dev/null 2>&1; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# Install as a path entry: mypy, pyright and editors do not support setuptools' import hook.
EDITABLE := --config-settings editable_mode=compat -e
# Silences setuptools' deprecation warning for this mode.
QUIET_PIP := PYTHONWARNINGS=ignore

# One thread for each worker, because more threads than cores are slower. Bytecode is written, so
# that the processes that tests start do not compile the modules again.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-all test-versions lint format types examples docs bench mutants tpu cuda clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# The quick tests; CI runs all tests. tests/support/tiers.py marks the slow tests.
test: MARKED := not slow and not sweep and not ahead
test-all: MARKED := not sweep and not ahead
test test-all: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(MARKED)" $(PYTEST_ARGS)

# The quick tests on other versions of Python and of both frameworks. They take hours, and 3 GB for
# each CUDA build of PyTorch. VERSIONS="oldest newest" runs only these two.
test-versions: $(STAMP)
	$(BIN)/python -m tests.support.versions $(VERSIONS)

# Checks that the quick tests detect planted bugs; takes half an hour or more.
mutants: $(STAMP)
	$(BIN)/python -m tests.support.mutants --workers $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)
	$(BIN)/mypy

examples: $(STAMP)
	@set -e; for program in examples/u*.py; do \
	    echo "== $$program"; $(BIN)/python "$$program" --backend both; done
	$(BIN)/python examples/cross_check_minilm.py

# Builds the site from docs/, the docstrings and the examples; fails if a link is broken.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open build/site/index.html"

$(VENV)/.docs-installed: $(STAMP)
	$(QUIET_PIP) $(BIN)/python -m pip install --quiet -c constraints.txt $(EDITABLE) ".[all]" --group docs
	@touch $@

# Compiles for TPU and GPU ahead of time, without a device. The compilers are installed in a separate
# environment that reads the packages of .venv, because JAX searches for a device if the compilers
# are installed. The tests run in one process, because a compilation needs gigabytes of memory.
AHEAD := .venv-ahead
AHEAD_ENV := JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 XLA_FLAGS=--xla_gpu_autotune_level=0 \
    TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-4 \
    GRADTOOLS_TEST_OPTIMIZED=1 PYTHONPATH=.
tpu cuda: $(AHEAD)/.installed
	$(AHEAD_ENV) $(AHEAD)/bin/python -m pytest -m ahead -k $@ tests/jax/test_ahead_of_time.py $(PYTEST_ARGS)
	$(AHEAD_ENV) $(AHEAD)/bin/python benchmarks/ahead_of_time.py $@

$(AHEAD)/.installed: $(STAMP)
	$(BIN)/python -m venv $(AHEAD)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    >"$$($(AHEAD)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(AHEAD)/bin/python -m pip install --quiet "pip>=25.1"
	$(QUIET_PIP) $(AHEAD)/bin/python -m pip install --quiet -c constraints.txt $(EDITABLE) ".[all]" --group ahead
	@touch $@

bench: $(STAMP)
	@set -e; for program in benchmarks/cost.py $(filter-out benchmarks/cost% benchmarks/ahead% benchmarks/steps_%,$(wildcard benchmarks/*.py)); do \
	    echo "== $$program"; $(BIN)/python "$$program"; done

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "gradtools needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1"  # supports dependency groups
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(QUIET_PIP) $(BIN)/python -m pip install --quiet -c constraints.txt $(EDITABLE) ".[all]" --group test
	@touch $@

clean:
	rm -rf $(VENV) .venv-versions .venv-313 .venv-integration .venv-ahead build dist out *.egg-info \
	    .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
