# Every target works first in a fresh clone: the environment is made on demand.
#   make train                      digits with revnet38; make train ARGS="model=revnet110" for another run
#   make test                       all tests but the slow ones, notebooks included (installs the test tools)
#   make gpu OUT=results            tests and benchmarks on a GPU, in twelve minutes; STAGES=1,2 for some of them
#   make smoke                      half a minute of tests: the engine, sequences, models, configurations
#   make docs                       the site: docs/_build/html/index.html
#   make test WORKERS=0             in one process, instead of two
#   make test PYTHON=python3.12     with another interpreter
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
OUT ?= gpu-results
STAGES ?= 1,2,3,4
SMOKE := $(addprefix tests/,core/test_tape.py core/test_contract.py layers/test_sequence.py \
  models/test_registry.py cli/test_config.py cli/test_check.py data/test_digits.py test_facade.py)
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.installed-package
TOOLS := $(VENV)/.installed
SITE := $(VENV)/.installed-docs

.PHONY: train test smoke test-slow lint docs gpu bench clean
.DEFAULT_GOAL := test

train: $(PACKAGE)
	$(BIN)/python train.py $(ARGS)

test: $(TOOLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --nbmake --nbmake-timeout=300 --timeout=300 notebooks

smoke: $(TOOLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile -q $(SMOKE) $(ARGS)

test-slow: $(TOOLS)
	$(BIN)/python -m pytest -m slow --timeout=3600 $(ARGS)

lint: $(TOOLS)
	$(BIN)/python -m ruff check --no-cache .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs: $(SITE)
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

gpu: $(TOOLS)
	$(BIN)/python benchmarks/gpu_kit.py --out $(OUT) --stages $(STAGES)

bench: $(TOOLS)
	@for script in benchmarks/bench_*.py; do $(BIN)/python "$$script" $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# A stamp is newer than pyproject.toml once the package is installed; a half-made environment is made anew.
$(PACKAGE): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  command -v $(PYTHON) >/dev/null 2>&1 \
	    || { echo "revzoo needs Python >= 3.11: '$(PYTHON)' was not found; name one with make PYTHON=..." >&2; exit 1; }; \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "revzoo needs Python >= 3.11: '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name a newer one with make PYTHON=..." >&2; exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "revzoo needs Python's venv module: '$(PYTHON)' lacks it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(TOOLS): $(PACKAGE)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

$(SITE): $(PACKAGE)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[docs]'
	@touch $@
