# make demo       serve a tiny MiniMax-H3 in bf16, h3_fp8 and h3_int8 and compare the clips
# make test       linters, types and tests
# make test-all   the same with exhaustive sweeps, as .ci/run does
# make coverage   all tests, and which lines they ran; takes twice as long
# All first create .venv with the exact versions in constraints.txt, which clones share: see .ci/environment.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --durations=10

# Some environments forbid bytecode files; without them every process compiles vLLM again.
export PYTHONDONTWRITEBYTECODE =
export HF_HUB_OFFLINE = 1
export TRANSFORMERS_OFFLINE = 1

.PHONY: demo test test-all coverage lint ruff mypy pytest pytest-all clean

demo: $(READY)
	$(BIN)/vllm-h3-quant demo

# Types are read while tests wait for engines.
test test-all: ruff
	$(MAKE) --jobs=2 mypy $(subst test,pytest,$@)

pytest: $(READY)
	$(PYTEST) -m "not exhaustive"

pytest-all: $(READY)
	$(PYTEST)

coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term

lint: ruff mypy

ruff: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(READY)
	nice $(BIN)/mypy

$(READY): pyproject.toml constraints.txt .ci/environment
	.ci/environment

clean:
	rm -rf $(VENV) out
