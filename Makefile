# make quickstart   the whole chain on this machine's CPU, into runs/quickstart (SEED=3 for another)
# make test         the test suite on two cores (ARGS=-x for other options of pytest;
#                   EXTRAS=test,parity,gym to compare with torch and reasoning-gym as well)
# make lint         style and format, without changing anything
# make clean        removes what these made, but not runs/

PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
ARGS ?= -n 2 --dist loadscope
EXTRAS ?= test

.PHONY: quickstart test lint clean

quickstart: $(VENV)/.installed
	$(VENV)/bin/python -m experiments.quickstart --seed $(SEED) --workdir runs/quickstart

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The files that begin with a dot are stamps: what they stand for is not done again.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "demyrl needs Python 3.11 or newer, and $(PYTHON) is:" \
	    "$$($(PYTHON) --version 2>&1). Say which to use: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: setup.py $(VENV)/.made
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: setup.py $(VENV)/.made
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@ $(VENV)/.installed
