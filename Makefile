# Two commands set everything up on a fresh machine: `make run` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
CLIENTS_BIN := .venv-clients/bin
MODEL ?= smol-135m
MODEL_DIR_smol-135m := artifacts/models/smol-135m/v3
MODEL_DIR_tiny := fixtures/tiny-llama
MODEL_DIR := $(or $(MODEL_DIR_$(MODEL)),$(MODEL))

.DEFAULT_GOAL := help
.PHONY: help setup model run test lint check fuzz soak drain-drill deploy-check clients metrics conform equivalence mutants docs generate bench-peers bench-cache bench-spec clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/package: pyproject.toml
	$(PYTHON) -m venv .venv
	@echo 'installing the package and what it needs ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/dev: .venv/package
	@echo 'installing what the tests need ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.venv/bench: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

.venv/deploy: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[deploy]'
	@touch $@

.venv/docs: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

setup: .venv/package  ## Create .venv with the trio-tlserve command

model: .venv/package  ## Fetch the default model, SmolLM2-135M-Instruct, once
	@$(BIN)/python fixtures/fetch_model.py

run: .venv/package $(if $(filter smol-135m,$(MODEL)),model)  ## Serve the default model; MODEL=tiny or MODEL=path for another
	TL_ENGINE__MODEL_DIR='$(MODEL_DIR)' exec $(BIN)/trio-tlserve runtime.toml

test: .venv/dev  ## Run the test suite (about five minutes; fetches the default model)
	$(BIN)/python -m pytest

lint: .venv/dev  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## All that must hold before a commit

fuzz: .venv/dev  ## Look for inputs that break an invariant; ARGS="--minutes 12 HTTP GGUF"
	nice $(BIN)/python -m tests.fuzz $(ARGS)

soak: .venv/dev model  ## Clients of every kind at once; ARGS="--minutes 15 --model DIR"
	$(BIN)/python -m tests.soak $(ARGS)

drain-drill: .venv/dev .haproxy  ## Restart two servers behind HAProxy under load; ARGS="--restarts 10 --model DIR"
	$(BIN)/python -m tests.soak.drain_drill $(ARGS)

deploy-check: .venv/deploy .deploy-programs  ## Files of docs/deploy: by their programs and schemas, behind real proxies, as an image
	DEPLOY=full $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/deploy $(ARGS)

.PHONY: .deploy-programs
.deploy-programs:  # Debian's packages; without RUNLEVEL=1 they would start services of their own
	@export PATH="$$PATH:/usr/sbin"; missing=; \
	for pair in haproxy:haproxy nginx:nginx-light promtool:prometheus kubectl:kubernetes-client \
	    systemd-analyze:systemd setpriv:util-linux; do \
		command -v $${pair%:*} >/dev/null || missing="$$missing $${pair#*:}"; \
	done; \
	/usr/bin/python3 -c 'import ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	[ -z "$$missing" ] || { apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends $$missing; }

# What other people's packages warn of is theirs.
clients: .venv-clients/installed tests/clients/node_modules/.installed  ## Other people's clients against a live server
	$(CLIENTS_BIN)/python -m pytest -W ignore tests/clients

.venv-clients/installed: pyproject.toml
	$(PYTHON) -m venv .venv-clients
	@echo 'installing the clients ...'
	@$(CLIENTS_BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[clients]'
	@touch $@

tests/clients/node_modules/.installed: tests/clients/package.json | .node
	npm install --prefix tests/clients --no-package-lock --no-audit --no-fund --silent
	@touch $@

.PHONY: .node
.node:  # Debian's packages
	@command -v node >/dev/null && command -v npm >/dev/null && command -v curl >/dev/null || { \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm curl; }

.PHONY: .haproxy
.haproxy:  # Debian's package; without RUNLEVEL=1 it would start a service of its own
	@PATH="$$PATH:/usr/sbin" command -v haproxy >/dev/null || { \
		apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends haproxy; }

metrics: .venv/dev model .prometheus  ## Dashboard and alerts against a real Prometheus; draws docs/pictures/metrics.png
	$(BIN)/python -m tests.metrics $(ARGS)

.PHONY: .prometheus
.prometheus:  # Debian's package; without RUNLEVEL=1 it would start a service of its own
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || { \
		apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends prometheus; }

CONFORM_MODEL := $(if $(filter file,$(origin MODEL)),tiny,$(MODEL))
conform: .venv/package $(if $(filter smol-135m,$(CONFORM_MODEL)),model)  ## A server of the tiny model against every rule of the API; ARGS="--only err"
	@mkdir -p build
	$(BIN)/python -m tests.conform '$(or $(MODEL_DIR_$(CONFORM_MODEL)),$(CONFORM_MODEL))' --junit build/conform.xml $(ARGS)

equivalence: .venv/dev  ## Every combination of engine features gives the reference's bits
	EQUIVALENCE=full $(BIN)/python -m pytest -q -o faulthandler_timeout=0 tests/test_equivalence.py

mutants: .venv/dev  ## Put 16 known faults into a copy of the code, one at a time; each must be caught
	$(BIN)/python -m tests.mutants

docs: .venv/docs generate  ## Build the documentation's site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

generate: .venv/dev  ## Write the parts of the documentation that come from the code
	$(BIN)/python -m tests.generated

bench-peers: .venv/bench model  ## Ours against llama.cpp into docs/benchmarks.md; ARGS="--peer-bin DIR --peer-build TEXT --rows Q4_1"
	$(BIN)/python -m tests.bench.peers $(ARGS)

bench-cache: .venv/bench model  ## What a shared prefix saves, and what evicting a block costs
	$(BIN)/python -m tests.bench.peers --rows cache $(ARGS)

bench-spec: .venv/bench model  ## Prompt lookup against none
	$(BIN)/python -m tests.bench.peers --rows spec $(ARGS)

clean:  ## Remove what the other targets made, except the fetched model
	rm -rf .venv .venv-clients tests/clients/node_modules build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find tlserve tests fixtures -name __pycache__ -type d -exec rm -rf {} +
