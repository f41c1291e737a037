# PYTHON      the interpreter of the virtual environment, 3.10 to 3.14
# PIP_FLAGS   further options for pip: on a machine without a GPU, the index of PyTorch's CPU builds
#             avoids several gigabytes of CUDA libraries
# ARGS        options for `te train` or for pytest: make train ARGS="--recipe mxfp8 --steps 100",
#             make test ARGS="-m slow" for the slow tests: all pairs of options, of which `make test` covers a part
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
# Modules are compiled to bytecode when they are first imported. Compiling all of torch and JAX would take a third of
# pip's time.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt $(PIP_FLAGS)
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))

# OpenMP threads that spin while they wait slow a busy machine down twentyfold. Sleeping costs little on an idle machine.
export OMP_WAIT_POLICY ?= passive

# Without bytecode on disk, each subprocess of the tests compiles all of torch again, which takes four seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check-tests help quick train test pytest clients test-clients check coverage docs distributions setup clean

help:
	@echo "make train         train a small GPT in FP8 and in high precision"
	@echo "make test          ruff, pyright and the tests, without the slow ones"
	@echo "make check         ruff and pyright"
	@echo "make quick         ruff and a minute of tests, for every save"
	@echo "make pytest        the tests of make test alone"
	@echo "make coverage      the tests with their coverage"
	@echo "make clients       install the published clients of the tests"
	@echo "make test-clients  install and test the published clients"
	@echo "make docs          build the documentation in site/"
	@echo "make distributions build the distributions for a package index in dist/"
	@echo "make setup         install the package with its tests and docs in $(VENV)"
	@echo "make clean         remove $(VENV) and all build results"

train: $(VENV)/.cli
	$(BIN)/te train $(ARGS)

test: check pytest

# One test file per layer of the package.
QUICK := tests/architecture/test_layers.py tests/architecture/test_wording.py tests/architecture/test_readability.py \
	tests/common/test_dispatch.py tests/quantization/test_autocast.py tests/tensor/test_quantized_tensor.py \
	tests/functions/test_linear.py tests/ops/test_state.py

quick: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(QUICK) $(ARGS)

pytest: $(VENV)/.test $(VENV)/.jax-plugin
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 -m "not slow" $(ARGS)

# Unmodified published clients of the original, without dependencies that the tests do not need. After their
# installation, `make test` also runs their tests.
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

# Types of the tests, which pass wrong arguments on purpose: rules on types of arguments and attributes are off.
check-tests: $(VENV)/.test
	$(BIN)/pyright -p tests --pythonpath $(BIN)/python

coverage: $(VENV)/.test $(VENV)/.jax-plugin
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term-missing:skip-covered --cov-fail-under=90 $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The import packages under a name that package indexes do not have, and a distribution of metadata for clients.
distributions: $(VENV)/.test
	$(BIN)/python distributions/build.py $(ARGS)

# The requirements of `docs` and `test`, resolved and installed together. Afterwards no target of these two installs
# anything, so that `make -j docs check` runs both at the same time.
setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs,test]'
	@touch $(VENV)/.docs $(VENV)/.test $@
	@$(MAKE) --no-print-directory $(VENV)/.jax-plugin

clean:
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c '$(SUPPORTED)' || { \
		echo "$(PYTHON) is `$(PYTHON) --version 2>&1`; Python 3.10 to 3.14 is needed: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# JAX's CUDA plugin of jax's own version, 8 MB without its libraries: with it, kernels are lowered for CUDA on any
# machine. Without it, the tests of lowering are skipped with this reason.
JAX_VERSION := import importlib.metadata as m; print(m.version("jax"))
$(VENV)/.jax-plugin: $(VENV)/.test
	-test "`uname`" != Linux || $(INSTALL) --no-deps jax-cuda13-plugin==`$(BIN)/python -c '$(JAX_VERSION)'`
	@touch $@

# One stamp for each extra: the package is installed in place, so that only its requirements can become outdated.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[$*]'
	@touch $@
