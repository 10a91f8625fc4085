# On a fresh machine `make demo` and `make test` need Python 3.11 or newer and nothing else.
# Each builds .venv once; the stamp file makes the next call quick.

# The first interpreter that runs: a name may be a version manager's stand-in that does not.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
    if $$p -c '' >/dev/null 2>&1; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
# As a path, which mypy, pyright and editors follow; they do not follow setuptools' import hook.
EDITABLE := --config-settings editable_mode=compat -e
# setuptools says on every installation that this mode is to be replaced.
QUIET_PIP := PYTHONWARNINGS=ignore

# One thread for each worker: more threads than cores make both slower. Compiled modules are kept,
# which the many processes that tests start would each compile again.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-all test-versions lint format types examples docs bench mutants tpu cuda clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# What a contributor waits for; CI runs all (tests/support/tiers.py: how marks say what is quick).
test: MARKED := not slow and not sweep and not ahead
test-all: MARKED := not sweep and not ahead
test test-all: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(MARKED)" $(PYTEST_ARGS)

# The quick tests on other versions of Python and of both frameworks: hours, and 3 GB for each CUDA
# build of PyTorch. VERSIONS="oldest newest" runs these alone.
test-versions: $(STAMP)
	$(BIN)/python -m tests.support.versions $(VERSIONS)

# Whether the quick tests see what is wrong: half an hour or more.
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

# The site, from docs/, the docstrings and the examples; it fails on a dead link.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open build/site/index.html"

$(VENV)/.docs-installed: $(STAMP)
	$(QUIET_PIP) $(BIN)/python -m pip install --quiet -c constraints.txt $(EDITABLE) ".[all]" --group docs
	@touch $@

# The compilers of TPU and GPU, ahead of time: neither is needed. They stand beside .venv, whose
# packages they read, as JAX looks for a device where they are installed. One process: a
# compilation takes gigabytes.
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
	$(BIN)/python -m pip install --quiet "pip>=25.1"  # which knows dependency groups
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(QUIET_PIP) $(BIN)/python -m pip install --quiet -c constraints.txt $(EDITABLE) ".[all]" --group test
	@touch $@

clean:
	rm -rf $(VENV) .venv-versions .venv-313 .venv-integration .venv-ahead build dist out *.egg-info \
	    .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
