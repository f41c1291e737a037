# PYTHON      the interpreter of the virtual environment, 3.10 to 3.13
# PIP_FLAGS   further options for pip: on a machine without a GPU, the index of PyTorch's CPU builds
#             avoids several gigabytes of CUDA libraries
# ARGS        options for `te train` or for pytest: make train ARGS="--recipe mxfp8 --steps 100",
#             make test ARGS="-m slow" for the tests that are not run always: all pairs of what a cover goes through
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
# A module is compiled when it is first imported: pip would compile all of torch's and JAX's, a third of its time.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(PIP_FLAGS)
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

# OpenMP threads that wait by spinning slow a busy machine down twentyfold; sleeping costs an idle one little.
export OMP_WAIT_POLICY ?= passive

# Without bytecode on disk each of the many processes that tests start compiles all of torch again: four seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test clients test-clients check coverage docs setup clean

train: $(VENV)/.cli
	$(BIN)/te train $(ARGS)

test: check $(VENV)/.jax-plugin
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 -m "not slow" $(ARGS)

# Published clients of the original, as they are; without what they would bring along and do not need here. Once they
# are installed, `make test` runs their tests too.
clients: $(VENV)/.test $(VENV)/.clients

test-clients: clients
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m clients tests/clients $(ARGS)

$(VENV)/.clients: tests/clients/requirements.txt | $(VENV)/.test
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "the clients need Python 3.11 to 3.13; make PYTHON=python3.12 VENV=.venv312 test-clients"; exit 1; }
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python -r $<
	@touch $@

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

coverage: $(VENV)/.test $(VENV)/.jax-plugin
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term-missing:skip-covered --cov-fail-under=90 $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What both `docs` and `test` need, resolved and installed at once.
setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs,test]'
	@touch $(VENV)/.docs $(VENV)/.test $@

clean:
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c '$(SUPPORTED)' || { \
		echo "$(PYTHON) is `$(PYTHON) --version 2>&1`; Python 3.10 to 3.13 is needed: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# JAX's CUDA plugin of jax's own version, 8 MB without its libraries: with it kernels are lowered for CUDA on any machine.
# Where it is missing, the tests of lowering are skipped with that sentence.
JAX_VERSION := import importlib.metadata as m; print(m.version("jax"))
$(VENV)/.jax-plugin: $(VENV)/.test
	-test "`uname`" != Linux || $(INSTALL) --no-deps jax-cuda13-plugin==`$(BIN)/python -c '$(JAX_VERSION)'`
	@touch $@

# One stamp for each extra: the package is installed in place, so that only its requirements can go stale.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[$*]'
	@touch $@
