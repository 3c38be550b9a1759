# The project's commands. Each makes .venv when it is missing; Python 3.11+ with venv and pip is all they need.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
EXTRAS := dev,tokenizers,parity

# The lab runs on CPUs; set JAX_PLATFORMS to use an accelerator.
export JAX_PLATFORMS ?= cpu

.PHONY: reproduce test lint extras aot

reproduce: .venv/made
	$(BIN)/phase-jax reproduce $(ARGS)

test: .venv/made
	$(BIN)/pytest -n 2 --dist loadscope $(ARGS)

lint: .venv/made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Compiles the kernels for TPUs, which takes no TPU.
aot: EXTRAS := dev,tpu
aot: extras
	$(BIN)/python -m experiments.aot $(ARGS)

extras: .venv/made
	$(PIP) --editable ".[$(EXTRAS)]"

.venv/made: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable ".[dev]"
	touch $@
