# Two commands: `make demo` and `make test`. Both set up .venv by themselves.
# The Python that the lock files were made with if it is there, else the newest that is supported.
ifndef PYTHON
PYTHON := $(firstword $(foreach version,3.11 3.13 3.12 3.10,$(if $(shell command -v python$(version)),python$(version))))
endif
NEW = $(if $(PYTHON),$(PYTHON) -m venv,$(error Python 3.10 to 3.13 is needed and none was found; install one, or name it: make PYTHON=/path/to/python3))
VENV   ?= .venv
BIN    := $(VENV)/bin
# Lock files name every package with its hashes. What torch from PyPI needs beside (CUDA) comes with our own package.
LOCKED := pip install --quiet --disable-pip-version-check --require-hashes --no-deps
OURS   := pip install --quiet --disable-pip-version-check --no-build-isolation -e .
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PRECIOUS: $(VENV)-%/.ready
.PHONY: audit demo docs test lint test-core test-long test-all test-eval test-vllm test-vllm-next test-vllm-smoke setup clean wheel

demo: setup
	$(BIN)/ace demo

test: lint test-core

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-core: setup
	$(BIN)/pytest -n 2 -m "not slow and not long"

# What takes seconds each: compilers, browsers, killed and resumed commands, searches.
test-long: setup
	$(BIN)/pytest -n 2 -m "long and not slow"

# The core suite under the oldest and the newest supported transformers, everything slow, the harnesses, and vLLM on the CPU.
test-all: test test-long test-5.17 test-5.23 test-eval test-vllm
	$(BIN)/pytest -m slow

# lm-eval and EvalScope themselves, in an environment that has them.
HARNESSES := lm-eval==0.4.13 evalscope==1.14.1
test-eval: $(VENV)-eval/.ready
	$(VENV)-eval/bin/pytest tests/lab/test_harness.py

# vLLM on the CPU, in an environment of its own (3.4 GB), by both generations of its model runner: a CPU takes the first, a GPU
# the second, whose kernels are interpreted here. About 20 minutes each on two cores, the smoke about 4 together.
SECOND := ACE_TEST_RUNNER=2
test-vllm: $(VENV)-vllm/.ready
	$(VENV)-vllm/bin/pytest tests/serving -m vllm
	$(SECOND) $(VENV)-vllm/bin/pytest tests/serving -m vllm

test-vllm-smoke: $(VENV)-vllm/.ready
	$(VENV)-vllm/bin/pytest tests/serving -m smoke
	$(SECOND) $(VENV)-vllm/bin/pytest tests/serving/test_engine_rows.py tests/serving/test_engine_requests.py -m vllm

# A release of vLLM whose CPU build is not out: its Python in front of the kernels of the one that is.
NEXT := 0.33.0
test-vllm-next: $(VENV)-vllm-next/.ready
	$(VENV)-vllm-next/bin/pytest tests/serving -m vllm
	$(SECOND) $(VENV)-vllm-next/bin/pytest tests/serving -m vllm -k "not compiled and not two_stages"

test-%: $(VENV)-%/.ready
	$(VENV)-$*/bin/pytest -n 2 -m "not slow"

# The pages as a site, in build/site; a warning or a dead link ends it.
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(VENV)-docs/bin/mkdocs build --strict --quiet

# Wheel and sdist, installed into fresh environments of every Python there is, and used there (slow: torch comes along).
wheel: setup
	$(BIN)/pytest -m slow tests/test_package.py

# Known holes in what the lock files name; asks a database on the network.
audit:
	$(NEW) $(VENV)-audit
	$(VENV)-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)-audit/bin/pip-audit --no-deps --disable-pip -r requirements-dev.lock

setup: $(VENV)/.ready

$(VENV)/.ready: requirements-dev.lock pyproject.toml
	@echo "$(@D): made with $(PYTHON)"
	$(NEW) $(VENV)
	$(BIN)/$(LOCKED) -r requirements-dev.lock
	$(BIN)/$(OURS)
	touch $@

$(VENV)-%/.ready: requirements-dev.lock pyproject.toml
	@echo "$(@D): made with $(PYTHON)"
	$(NEW) $(VENV)-$*
	sed -E '/^(transformers|huggingface-hub|tokenizers)==/,/[^\\]$$/d' requirements-dev.lock > $(VENV)-$*/requirements.txt
	$(VENV)-$*/bin/$(LOCKED) -r $(VENV)-$*/requirements.txt
	$(VENV)-$*/bin/$(OURS) "transformers==$*.*"
	touch $@

$(VENV)-eval/.ready: requirements-dev.lock pyproject.toml
	@echo "$(@D): made with $(PYTHON)"
	$(NEW) $(@D)
	$(@D)/bin/$(LOCKED) -r requirements-dev.lock
	$(@D)/bin/$(OURS) $(HARNESSES)
	touch $@

# Without their dependencies: vLLM's would bring torchvision for CUDA, which breaks transformers beside a CPU torch.
define WITH_VLLM
	@echo "$(@D): made with $(PYTHON)"
	$(NEW) $(@D)
	$(@D)/bin/$(LOCKED) -r requirements-vllm.lock
	$(@D)/bin/$(OURS) --no-deps torch==2.13.0+cpu
endef

$(VENV)-vllm/.ready: requirements-vllm.lock pyproject.toml
	$(WITH_VLLM)
	touch $@

$(VENV)-vllm-next/.ready: requirements-vllm.lock pyproject.toml tests/serving/newer_vllm.py
	$(WITH_VLLM)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps orjson
	$(@D)/bin/pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) vllm==$(NEXT)
	$(@D)/bin/python tests/serving/newer_vllm.py $(@D)/vllm-$(NEXT)-*.whl
	touch $@

$(VENV)-docs/.ready: requirements-docs.lock
	@echo "$(@D): made with $(PYTHON)"
	$(NEW) $(VENV)-docs
	$(VENV)-docs/bin/$(LOCKED) -r requirements-docs.lock
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* build dist ace-demo
