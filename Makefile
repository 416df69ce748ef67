# Two commands on a bare machine (Python 3.11 or newer; no GPU, no CUDA toolkit, no TeX):
#   make figures    draws the figures from results/
#   make test       runs the tests
# Each makes .venv and installs what it needs from requirements/*.txt, once.

# The Python that makes .venv.
PYTHON ?= python3
# A Python of yours that has everything already (a GPU node's own): make bench RUN_WITH=python3 installs nothing.
RUN_WITH ?=
# For `make bench` and `make plan`.
DEVICE ?= $(or $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | grep -oiE -m1 'h100|h200|b200' | tr A-Z a-z),h200)
OVERRIDES ?= experiment=step_slope device=$(DEVICE)
PLAN ?= plan.json

VENV := .venv
PY := $(or $(RUN_WITH),$(VENV)/bin/python)
ifeq ($(RUN_WITH),)
DRAWING := $(VENV)/.installed-figures
TESTING := $(VENV)/.installed-dev
endif
# A Python of yours may lack pytest-xdist. `auto` is one worker a core, and none where there is a GPU (tests/conftest.py). Each worker begins with
# neighbouring tests, which share fixtures and kernels, and then takes from those that are behind.
PARALLEL = $(if $(shell $(PY) -c 'import xdist' 2> /dev/null && echo it is here),-n auto --maxprocesses 8 --dist worksteal)
CUDA_SOURCES = $(shell find kernels -name '*.cuh' -o -name '*.cu')

# The oracle walks under the rounding of SGLang's walk and under the resident one's. It is slow, so prompts are fewer and shorter.
TINY_ACCEPTANCE = experiment.prompts=45 experiment.prompt_tokens=32 \
  'experiment.loads=[{batch: 1, tokens: 3}, {batch: 16, tokens: 16}, {batch: 64, tokens: 16}]' \
  'experiment.variants=[{label: sglang_folded, backend: reference}, {label: resident, backend: reference, options: {rounding: int8}}]'

.PHONY: help figures verify test check format bench study plan publish lock clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

figures: $(DRAWING) ## draw every figure from results/ into paper/figures/ (no GPU, no torch)
	$(PY) -m figures.draw

verify: $(DRAWING) ## paper | ours | ratio | verdict; fails when a record no longer supports the text
	$(PY) -m analysis.claims --verify

test: $(TESTING) ## run the tests (those that need a GPU are skipped where there is none)
	$(PY) -m pytest $(PARALLEL)

check: $(VENV)/.installed-dev ## lint, formatting and types: ruff, pyright, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(if $(CUDA_SOURCES),$(VENV)/bin/clang-format --dry-run -Werror $(CUDA_SOURCES))

format: $(VENV)/.installed-dev ## rewrite the sources the way `make check` wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(if $(CUDA_SOURCES),$(VENV)/bin/clang-format -i $(CUDA_SOURCES))

bench: $(TESTING) ## measure all that the figures need on this machine's GPU, into runs/ [DEVICE=h200]
	$(PY) -m experiments.run experiment=toy_walk
	$(PY) -m experiments.run experiment=capacity
	$(PY) -m experiments.run experiment=packing_map
	$(PY) -m experiments.run experiment=quantization device=$(DEVICE)
	$(PY) -m experiments.run experiment=step_slope device=$(DEVICE)
	$(PY) -m experiments.run experiment=walk_latency device=$(DEVICE) head=markov_v129k 'experiment.steps=[5]'
	$(PY) -m experiments.run experiment=walk_latency device=$(DEVICE) head=markov_v152k 'experiment.steps=[7,16]'
	$(PY) -m experiments.run experiment=walk_latency device=$(DEVICE) head=markov_v248k 'experiment.steps=[15]'
	$(PY) -m experiments.run experiment=exchange device=$(DEVICE)
	$(PY) -m experiments.run experiment=placement device=$(DEVICE)
	$(PY) -m experiments.run experiment=step_breakdown device=$(DEVICE)
	$(PY) -m experiments.run experiment=rivals device=$(DEVICE) head=markov_v129k 'experiment.steps=[5]'
	$(PY) -m experiments.run experiment=rivals device=$(DEVICE) head=markov_v152k 'experiment.steps=[7,16]'
	$(PY) -m experiments.run experiment=rivals device=$(DEVICE) head=markov_v248k 'experiment.steps=[15,16]'
	$(PY) -m experiments.run experiment=step_anatomy device=$(DEVICE)
	$(PY) -m experiments.run experiment=train_pair device=$(DEVICE) pair=qwen_vocab
	$(PY) -m experiments.run experiment=quantization device=$(DEVICE) inputs=trained pair=qwen_vocab
	$(PY) -m experiments.run experiment=walk_latency device=$(DEVICE) inputs=trained pair=qwen_vocab 'experiment.batches=[1,16,64]'
	$(PY) -m experiments.run experiment=certified device=$(DEVICE) head=markov_v152k
	$(PY) -m experiments.run experiment=certified device=$(DEVICE) head=markov_v248k 'experiment.steps=[15]'
	$(PY) -m experiments.run experiment=certified device=$(DEVICE) inputs=trained pair=qwen_vocab 'experiment.temperatures=[0,1]'
	$(PY) -m experiments.run experiment=certified device=$(DEVICE) inputs=trained pair=qwen_vocab 'experiment.batches=[64]' 'experiment.steps=[7]'
	$(PY) -m experiments.run experiment=acceptance device=$(DEVICE) pair=qwen_vocab

study: $(TESTING) ## quantization and acceptance of the trained tiny pair, on any CPU in some minutes
	$(PY) -m experiments.run experiment=quantization inputs=trained pair=tiny
	$(PY) -m experiments.run experiment=acceptance pair=tiny $(TINY_ACCEPTANCE)

plan: $(TESTING) ## write a plan for a machine without Hydra, Git or network [OVERRIDES="experiment=step_slope" PLAN=plan.json]
	$(PY) -m experiments.plan -o $(PLAN) $(OVERRIDES)

publish: $(DRAWING) ## copy finished runs into results/ [RUN="runs/EXPERIMENT/RUN_ID ..."]
	@test -n "$(RUN)" || { echo "Say which run: make publish RUN=runs/EXPERIMENT/RUN_ID"; exit 2; }
	$(PY) -m scripts.publish $(RUN)

lock: $(VENV)/.installed-dev ## resolve pyproject.toml into requirements/*.txt again, keeping the versions that still fit
	$(call resolve,requirements/dev.txt,--extra dev)
	$(call resolve,requirements/figures.txt,--constraint requirements/dev.txt)

clean: ## remove .venv and all caches (runs/ and results/ stay)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1) lock file, $(2) what to resolve. The comment at the top of the lock is kept.
define resolve
cp $(1) $(1).new
$(VENV)/bin/uv pip compile pyproject.toml $(2) --quiet -o $(1).new > /dev/null
{ grep '^#' $(1); grep -v -e '^#' -e '^$$' $(1).new; } > $(1).whole && mv $(1).whole $(1) && rm $(1).new
endef

# A stamp is written last: an interrupted install leaves none, and the next call takes it up again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || \
	  { echo "This needs Python 3.11 or newer and $(PYTHON) is not it ($$($(PYTHON) -V 2>&1)); name one that is: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: requirements/%.txt $(VENV)/.made
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
