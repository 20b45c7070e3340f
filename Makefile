# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test lint bench clean
install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gar needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[quickstart,torchjd,dev]'
	touch $@

quickstart: install
	$(BIN)/gar quickstart

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/gar bench step

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
