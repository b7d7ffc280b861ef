# make demo   serve a tiny MiniMax-H3 in bf16, h3_fp8 and h3_int8 and compare the clips
# make test   linters, types and all tests
# make coverage   all tests, and which lines they ran; takes twice as long
# All first create .venv with the exact versions in constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Some environments forbid bytecode files; without them every process compiles vLLM again.
export PYTHONDONTWRITEBYTECODE =
export HF_HUB_OFFLINE = 1
export TRANSFORMERS_OFFLINE = 1

.PHONY: demo test coverage lint clean

demo: $(READY)
	$(BIN)/vllm-h3-quant demo

test: lint
	$(BIN)/python -m pytest -n 2 --durations=10

coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --constraints constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) out
