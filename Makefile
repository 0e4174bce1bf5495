# make demo, make test and make site do all of their own set-up on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test site examples package check clean

demo: $(STAMP)
	$(BIN)/mimicnorm compare --out runs/demo

test: $(STAMP) check
	$(BIN)/python -m pytest -n 2 --dist worksteal tests src
	$(BIN)/python -m pytest README.md docs   # a page's examples build on each other: one process

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --site-dir site

examples: $(STAMP)   # part of make test, too
	$(BIN)/python -m pytest -n 2 tests/examples

package: $(STAMP)
	.ci/package $(abspath $(BIN))/python

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache site
