# Two commands matter: `make reproduce` and `make test`. Each sets itself up.
# The first of these that runs (a name alone may be a version manager's placeholder); or PYTHON=/path/to/one.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13; do $$name -c "import venv" 2>/dev/null && echo $$name && break; done)
PROFILE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSER_READY := $(VENV)/.browser-ready
# Idle threads sleep instead of spinning: beside another process, spinning ones make torch twenty times slower.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup fetch reproduce test test-machines lab notebooks benchmark check-results report browser-check clean

help:
	@echo "make reproduce [PROFILE=cpu]        run its notebooks, regenerate its figures and tables (cpu, smoke, losses, sweeps, beyond)"
	@echo "make test                           pytest, nbval over the notebooks, smoke reproduction"
	@echo "make test-machines [TESTS=...]      tests that compute, rounded as on other processors, in random order"
	@echo "make lab                            JupyterLab on the notebooks"
	@echo "make benchmark                      time of a speculative step against a bare target pass"
	@echo "make check-results [FRESH=1]        rerun a profile beside its kept results, say what moved beyond errors"
	@echo "make report [PROFILE=cpu|smoke]     one HTML page of a run: claims, figures, tables, notebooks"
	@echo "make browser-check                  optional: notebooks 00 and 01 in JupyterLab inside a headless Chromium"
	@echo "make notebooks                      refresh the committed outputs, and the tables of the README, from the kept results"

# The environment is rebuilt when its definition changes.
$(READY): pyproject.toml constraints.txt
	@python="$(PYTHON)"; command -v "$$python" >/dev/null || \
		{ echo "$${python:-python3.11, python3.12 or python3.13} not found: install one or set PYTHON=/path/to/it"; exit 1; }; \
	echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[reproduction,test]"
	@touch $(READY)

setup: $(READY)

fetch: $(READY)
	$(BIN)/python -m dblast fetch

reproduce: fetch
	$(BIN)/python -m dblast reproduce --profile $(PROFILE)

test: fetch
	$(BIN)/python -m tests.run_all

test-machines: $(READY)
	$(BIN)/python -m tests.machines $(TESTS)

lab: fetch
	$(BIN)/jupyter lab notebooks

notebooks: fetch
	DBLAST_REGENERATE=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.extra_arguments="['--log-level=ERROR']" notebooks/[0-9][0-9]_*.ipynb
	$(BIN)/python -m dblast readme

report: $(READY)
	$(BIN)/python -m dblast report --profile $(PROFILE)

check-results: fetch
	$(BIN)/python -m dblast check-results --profile $(PROFILE) $(if $(FRESH),--fresh)

# Playwright is only for this check, so that only this check installs it.
$(BROWSER_READY): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[reproduction,test,browser]"
	@touch $(BROWSER_READY)

browser-check: fetch $(BROWSER_READY)
	$(BIN)/python tests/browser/check.py

benchmark: fetch
	$(BIN)/python benchmarks/step_latency.py

clean:
	rm -rf runs build .pytest_cache
