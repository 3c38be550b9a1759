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

# Compiles the kernels, and the training step of three ids at the paper's scale, for TPUs, which takes no TPU.
FITTED := full_attn_8kv kvc_w8s8_1kv_baseline kvc_w8s4_dsv4kernel_1kv_rope16
aot: EXTRAS := dev,tpu
aot: extras
	$(BIN)/python -m experiments.aot $(ARGS)
	for id in $(FITTED); do $(BIN)/phase-jax fit --config=configs/paper.py:$$id --max-temporaries 4 || exit 1; done

extras: .venv/made
	$(PIP) --editable ".[$(EXTRAS)]"

.venv/made: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable ".[dev]"
	touch $@
