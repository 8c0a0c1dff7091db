# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Needs Python 3.11 or newer, a C++17 compiler and a package index; nothing else.

VENV   ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
            $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN     = $(VENV)/bin
comma   := ,
STAMP   = $(VENV)/.quire
# The compiler that CMake would take: $CXX, else the first of the common names.
COMPILER = $(shell for c in $${CXX:-c++ g++ clang++}; do command -v $$c && break; done 2>/dev/null)
NATIVE  = CMakeLists.txt pyproject.toml $(shell find native -name '*.cc' -o -name '*.h')

.PHONY: demo test exact lint docs parity gpu nixl fuzz browser ray manifests mooncake clients clients-installed bench clean help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort

demo: $(STAMP)-run  ## set up, start the server, stream an answer, shut down
	@$(BIN)/python examples/demo.py

test: $(STAMP)-test  ## set up and run the default test suite
	@$(BIN)/python -m pytest -n 4 --dist loadfile

exact: $(STAMP)-test  ## several times as many drawn cases as the default suite
	@QUIRE_EXACT_CASES=400 QUIRE_EXACT_RANK_CASES=40 QUIRE_EXACT_STAGE_CASES=20 \
		QUIRE_EXACT_CONNECTED_CASES=20 QUIRE_OVERLAP_CASES=48 QUIRE_DRAWN_CASES=300 \
		QUIRE_CONTINUATION_CASES=200 QUIRE_DISAGGREGATION_CASES=24 \
		QUIRE_STORE_CASES=20 QUIRE_PAIR_STORE_CASES=24 \
		$(BIN)/python -m pytest -n 3 --dist loadfile tests/exact tests/unit/scheduler \
		$$(grep -rl --include='test_*.py' 'from tests.drawn import' tests)

lint: $(STAMP)-lint  ## formatter, linter, types, import contracts, prose
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/prose_lint.py

docs: $(STAMP)-docs  ## the documentation site in build/site, and the commands on its pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@$(BIN)/python scripts/site/check.py build/site
	@$(BIN)/python -m pytest -m docs tests/serve/test_recipes.py

parity: $(STAMP)-parity  ## live comparison with transformers (installs PyTorch)
	@$(BIN)/python -m pytest -m parity tests

gpu: $(STAMP)-gpu  ## the GPU's kernels and executor, without a GPU (installs PyTorch and Triton)
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m gpu tests/gpu

nixl: $(STAMP)-nixl  ## KV blocks through the NIXL library (without a GPU)
	@$(BIN)/python -m pytest tests/unit/transfer/links/test_nixl.py \
		tests/exact/test_disaggregation.py tests/exact/test_disaggregation_and_store.py \
		tests/exact/test_kills.py -k nixl

fuzz: $(STAMP)-fuzz  ## requests made of the API's own document, against a live server
	@$(BIN)/python -m pytest -m fuzz tests/fuzz

browser: $(STAMP)-browser  ## the web page in a headless Chromium (needs chromium, chromedriver)
	@$(BIN)/python -m pytest -W ignore -m browser tests/browser

manifests: $(STAMP)-manifests  ## manifests and the rendered chart against the strict schemas
	@$(BIN)/python -m pytest tests/repository/test_kubernetes.py

ray: $(STAMP)-ray  ## ranks and an application of Ray Serve on a cluster of two nodes on this machine
	@$(BIN)/python -m pytest -W ignore -m ray tests/ray/test_ray_ranks.py
	@$(BIN)/python -m pytest -W ignore -m ray tests/ray/test_serve_app.py

clients:  ## clients from PyPI and, with Node.js, from npm against live servers (own environment)
	@$(MAKE) --no-print-directory VENV=$(VENV)-clients clients-installed
	@$(VENV)-clients/bin/python -m pytest -W ignore tests/clients
	@PYTHONPATH=$(VENV)-clients/agents $(VENV)-clients/bin/python -m pytest -W ignore \
		-k "agents or pydantic" tests/clients/test_frameworks.py

mooncake: $(STAMP)-mooncake $(STAMP)-nixl  ## Mooncake Store with its library and master, also beside NIXL (needs libibverbs1, libnl)
	@$(BIN)/python -m pytest -W ignore tests/mooncake

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(VENV)-clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f quire/_native*.so

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Quire needs Python 3.11 or newer; none was found on PATH."; exit 1; }
	@test -n "$(COMPILER)" || { cat native/compiler-missing.txt; exit 1; }
	@echo "[1/3] environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); cat native/venv-missing.txt; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade pip

# Compiles, and so runs once for all targets until a source changes.
$(STAMP)-package: $(BIN)/python $(NATIVE)
	@$(BIN)/python scripts/install.py $(BIN)/python
	@touch $@

# $(1): extras, whose packages are added to the environment.
define add
	@$(BIN)/python scripts/install.py --packages-only $(BIN)/python "$(1)"
	@touch $@
endef

$(STAMP)-run: $(STAMP)-package
	$(call add,[demo])
$(STAMP)-test: $(STAMP)-package
	$(call add,[test])
$(STAMP)-lint: $(BIN)/python pyproject.toml
	$(call add,[test$(comma)lint])
$(STAMP)-docs: $(STAMP)-package
	$(call add,[test$(comma)docs])
$(STAMP)-parity: $(STAMP)-package
	$(call add,[test$(comma)parity])
$(STAMP)-gpu: $(STAMP)-package
	$(call add,[test$(comma)gpu])
$(STAMP)-nixl: $(STAMP)-package
	@$(BIN)/python -m pip install --quiet --no-deps "nixl-cu12>=1.5,<2"
	$(call add,[test])
$(STAMP)-fuzz: $(STAMP)-package
	$(call add,[test$(comma)fuzz])
$(STAMP)-browser: $(STAMP)-package
	$(call add,[test$(comma)browser])
$(STAMP)-manifests: $(STAMP)-package
	$(call add,[test$(comma)manifests])
$(STAMP)-ray: $(STAMP)-package
	$(call add,[test$(comma)ray])
$(STAMP)-mooncake: $(STAMP)-package
	$(call add,[test$(comma)mooncake])
clients-installed: $(STAMP)-clients $(STAMP)-agents $(STAMP)-npm
# They need openai 3, which others refuse: before it on the path, in a folder of their own.
$(STAMP)-agents: $(STAMP)-clients
	@$(BIN)/python -m pip install --quiet --target $(VENV)/agents \
		"openai-agents>=0.24,<1" "pydantic-ai-slim[openai,anthropic]>=2,<3"
	@touch $@
$(STAMP)-npm: $(STAMP)-clients tests/clients/js/package.json
	@if command -v npm > /dev/null; then \
		mkdir -p $(VENV)/js && cp tests/clients/js/package.json $(VENV)/js/ && \
		npm install --prefix $(VENV)/js --no-audit --no-fund --no-package-lock --loglevel=error; fi
	@touch $@
$(STAMP)-clients: $(STAMP)-package
	$(call add,[clients])
