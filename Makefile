# Everything runs in .venv, which the first target that needs it makes. Nothing but Python 3.11+ and pip is assumed.

VENV   := .venv
BIN    := $(VENV)/bin
# The first interpreter that is new enough; override with `make PYTHON=/path/to/python3 ...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest

# Commands and brokers are started hundreds of times by the tests; each would compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE

SPARK := $(VENV)/.spark-installed
DEV  := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-pages test-console screenshots test-cluster test-monitoring test-planted faults check format test-jvm bench bench-spark bench-cluster bench-queues bench-security bench-check fuzz docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(SPARK) ## the whole system at work for a minute, checked at the end; ARGS="--seconds 20"
	$(BIN)/millrace demo $(ARGS)

# A test that exceeds its time limit takes its process with it. pytest-xdist 3.8.0 may wait for ever after it has replaced
# that process (its issue 1378), so it does not: the run ends with the test's name.
test: $(DEV) ## every test that needs Python only; ARGS="tests/unit -k recovery"
	$(PYTEST) -m "not cluster and not pages and not browser and not monitoring and not planted" -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=10 $(ARGS)

test-pages: $(DEV) ## README and docs, every command and program run; the package built, installed and used
	$(PYTEST) -m pages tests/pages -n 0 -rA --durations=10 $(ARGS)

test-console: $(DEV) ## the console in a real browser, Debian's chromium or MILLRACE_CHROMIUM (skipped, with the reason, without one)
	$(PYTEST) -m browser tests/console -n 0 -rs --durations=10 $(ARGS)

screenshots: $(DEV) ## the pictures of docs/console.md, taken again
	MILLRACE_SCREENSHOTS=docs/console $(PYTEST) tests/console/browser/test_every_page.py -k opens -n 0 -rs $(ARGS)

test-cluster: $(DEV) ## brokers, and Spark's processes, killed, paused, cut off and restarted while records flow, in short rounds
	$(PYTEST) -m cluster tests/cluster tests/spark -n 0 --durations=10 $(ARGS)

test-planted: $(DEV) ## bugs that are put into the code on purpose, each of which the models must find
	$(PYTEST) -m planted tests/models -n 2 --dist load --durations=10 $(ARGS)

test-monitoring: $(DEV) ## a Prometheus watches three brokers under load; every query of the dashboards and alerts is asked of it
	$(PYTEST) -m monitoring tests/monitoring -n 0 -rA $(ARGS)

faults: $(DEV) ## the same in full size, as a table; ARGS="--only leader --rounds 2"
	PYTHONPATH=tests $(BIN)/python -m cluster $(ARGS)

check: $(DEV) ## ruff, mypy --strict, layer contract, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_docs.py --check
	$(BIN)/python scripts/generate_monitoring.py --check

format: $(DEV) ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test-jvm: $(DEV) ## Apache Kafka's own Java tools against millrace (needs java and mvn)
	$(PYTEST) tests/jvm $(ARGS)

bench: $(DEV) ## millrace beside Apache Kafka (needs java and mvn); ARGS="--rounds 3 --only produce"
	PYTHONPATH=tests $(BIN)/python -m benches.system $(ARGS)

bench-spark: $(DEV) ## format("millrace") beside Spark's JVM Kafka connector (needs java and mvn); ARGS="--rounds 3"
	PYTHONPATH=tests $(BIN)/python -m benches.spark $(ARGS)

bench-cluster: $(DEV) ## three brokers beside three of Apache Kafka (needs java and mvn); ARGS="failover", ARGS="partitions"
	PYTHONPATH=tests $(BIN)/python -m benches.cluster $(ARGS)

bench-queues: $(DEV) ## a queue with five consumers beside Apache Kafka (needs java and mvn); ARGS="--rounds 5"
	PYTHONPATH=tests $(BIN)/python -m benches.system.queues $(ARGS)

bench-security: $(DEV) ## what TLS, rules and logins cost, with bars (needs java and mvn); ARGS="--only logins"
	PYTHONPATH=tests $(BIN)/python -m benches.system.security $(ARGS)

bench-check: $(DEV) ## start-up time and memory against their bars; fails when one is missed
	PYTHONPATH=tests $(BIN)/python -m benches.system.footprint $(ARGS)

fuzz: $(DEV) ## the fuzz tests with a large budget; MILLRACE_FUZZ_SECONDS=N for another one, each
	MILLRACE_FUZZ_SECONDS=$${MILLRACE_FUZZ_SECONDS:-120} $(PYTEST) -m fuzz --timeout=3600 $(ARGS)

docs: $(DEV) ## regenerate the generated pages of docs/ and the dashboards
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python scripts/generate_monitoring.py

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) .cache build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "millrace needs Python 3.11 or newer; none was found on PATH." \
		"Install one, or say: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "millrace needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(SPARK): pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable '.[spark]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable '.[dev,spark,postgres]'
	@touch $@ $(SPARK)
