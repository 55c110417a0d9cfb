# Python 3.11 or later and make are enough: every target creates what it needs, as an ordinary user.
#
#   make run PORT=9000                       another port
#   make test ARGS="tests/cli -k guard -x"   some of the tests, in one process
#   make run PYTHON=/opt/python/bin/python3  another Python for the environment

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(shell command -v $(name) 2>/dev/null)))
VENV   ?= .venv
BIN    := $(VENV)/bin
CONFIG ?= examples/langgraph.json
PORT   ?= 8123

# The tests of a file run in one process: they share its servers.
ALL_TESTS := -n 3 --dist loadfile
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run demo test test-fast test-slow test-matrix matrix-tools wheel services node-modules check format docs torture clean
.PHONY: bench bench-engine bench-streams bench-observability bench-scale bench-guard figures

help: ## say what there is
	@printf 'Usage: make TARGET\n\n'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

run: $(RUN_STAMP) ## start Holdfast with the graphs in examples/ (Ctrl-C stops it)
	@$(BIN)/holdfast dev --config $(CONFIG) --port $(PORT)

demo: $(RUN_STAMP) ## 30 seconds: kill a worker in the middle of a run and watch another finish it
	@$(BIN)/holdfast demo --config $(CONFIG)

test: $(DEV_STAMP) services node-modules ## run the tests, except those of test-slow (eight minutes on two cores)
	$(BIN)/python -m pytest -m "not slow" $(or $(ARGS),$(ALL_TESTS))

test-fast: $(DEV_STAMP) ## run the tests that need no server and no process (half a minute)
	$(BIN)/python -m pytest -m fast $(or $(ARGS),-n 2)

test-slow: $(DEV_STAMP) services node-modules test-matrix ## run torture, browser, schemathesis, rolling deploys, the matrix
	$(BIN)/python -m pytest -m slow $(or $(ARGS),$(ALL_TESTS))

test-matrix: $(DEV_STAMP) matrix-tools ## check each version of Python and Postgres (five minutes; FULL=1 runs more tests)
	$(BIN)/python -m tests.matrix $(if $(FULL),--full) $(foreach version,$(ONLY),--only $(version))

wheel: $(DEV_STAMP) ## build the wheel and the source distribution, and try the wheel in an empty environment
	$(BIN)/python -m tests.matrix.wheel

# Debian has the newest Python where this machine does not; these make a root directory of it and enter that.
matrix-tools:
	@test "$$(id -u)" != 0 || command -v python3.14 >/dev/null || { command -v mmdebstrap && command -v bwrap; } >/dev/null || { \
		echo "Installing mmdebstrap and bubblewrap, which bring Python 3.14"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mmdebstrap bubblewrap >/dev/null; }

# These are in no package index: PgBouncer, a browser, a Redis that knows sharded pub/sub, promtool, which comes with
# Prometheus, and `ip`, which makes network namespaces. Without them, and without the right to install them, their tests
# are skipped with a line that says so; in CI they fail.
services:
	@for program in pgbouncer redis-server chromium prometheus ip; do \
		package=$$(test $$program != ip && echo $$program || echo iproute2); \
		command -v $$program >/dev/null || test -x /usr/sbin/$$program || test "$$(id -u)" != 0 || { \
		echo "Installing $$program, which some tests need"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
		$$(test $$program != prometheus || echo --no-install-recommends) $$package >/dev/null; \
		service $$program stop >/dev/null 2>&1 || true; }; done

# The packages of the JavaScript tests. Where Node is not found, one line says that those tests will be skipped; in CI
# they fail.
node-modules: $(DEV_STAMP)
	@$(BIN)/python -m tests.support.node $(patsubst %/package.json,%,$(wildcard tests/js/*/package.json))

check: $(DEV_STAMP) ## lint, formatting, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP) ## write the generated pages: configuration, metrics, events, api
	$(BIN)/python -m holdfast.settings.reference > docs/configuration.md
	$(BIN)/python -m holdfast.telemetry.reference > docs/metrics.md
	$(BIN)/python -m holdfast.telemetry.catalogue > docs/events.md
	$(BIN)/python -m holdfast.api.reference > docs/api.md

torture: $(DEV_STAMP) ## hurt a fleet and look whether anything was lost: SEED=1 MINUTES=30 make torture
	$(BIN)/python -m tests.torture

bench: $(DEV_STAMP) ## compare with langgraph dev, Aegra and the bare graph (twenty minutes): make bench BENCH="--only holdfast"
	$(BIN)/python -m bench peers $(BENCH)

bench-engine: $(DEV_STAMP) ## measure the engine's figures (seven minutes)
	$(BIN)/python -m bench engine

bench-streams: $(DEV_STAMP) ## measure the figures of the streams (eight minutes)
	$(BIN)/python -m bench streams

bench-observability: $(DEV_STAMP) ## measure what logs and metrics cost (three minutes)
	$(BIN)/python -m bench observability

bench-scale: $(DEV_STAMP) ## measure what stays the same with more runs
	$(BIN)/python -m bench scale

figures: $(DEV_STAMP) ## measure what the documents publish and write it into them (some hours): make figures ONLY=takeover
	$(BIN)/python -m bench figures $(foreach name,$(ONLY),--only $(name)) $(if $(WRITE),--write)

bench-guard: $(DEV_STAMP) ## count what a run makes everybody do; ARGS=--accept to accept it
	$(BIN)/python -m bench guard $(filter --accept,$(ARGS))

clean: ## remove the environment and the caches (the data in .holdfast/ stays)
	rm -rf $(VENV) build dist tests/matrix/.debian src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . \( -name __pycache__ -o -name node_modules \) -type d -prune -exec rm -rf {} +

# The stamps are newer than what they were made from, so pip runs only when the pins change.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python found. Install 3.11 or later, or say: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: Holdfast needs 3.11 or later (make PYTHON=/path/to/python3)" >&2; exit 1; }
	@echo "Creating $(VENV) (first use only)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): requirements.txt pyproject.toml | $(BIN)/python
	@echo "Installing the pinned requirements"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(DEV_STAMP): requirements-clients.txt requirements-dev.txt requirements.txt pyproject.toml | $(BIN)/python
	@echo "Installing the pinned requirements, with the tools of development"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-clients.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@ $(RUN_STAMP)
