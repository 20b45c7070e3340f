# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# A process a core, of neighbouring tests: what a module's tests share is made once, not in every process.
SPREAD := -n auto --dist worksteal

.PHONY: install quickstart test test-all test-slow test-numerics lint docs bench clean
install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gar needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

quickstart: install
	$(BIN)/gar quickstart

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD)

# All of it at once, the slow ones among the others: no core waits for them.
test-all: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m ''

# What takes over half a minute by itself.
test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m slow

# What compares floating-point results once more: two threads, and the oldest instruction set of every library. With
# BIN=DIR/bin in another environment, as it is.
OLDEST := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Nehalem
test-numerics: $(if $(filter .venv/bin,$(BIN)),install)
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(OLDEST) $(BIN)/python -m pytest $(SPREAD) -m numerics tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/site; it has an environment of its own, and needs no torch.
DOCS := build/docs-env
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@echo "build/site/index.html"

$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >$(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -r $(DOCS)/requirements.txt
	touch $@

bench: install
	$(BIN)/gar bench step

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
