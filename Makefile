# Every target sets itself up: it needs make and python3 (3.10 or newer) and nothing else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
LOCK := requirements-test.lock
DEMO := sample_traces/legacy-null-stream-barrier/bad.sqlite

.PHONY: help demo test docs pages fuzz lock programs clean
.NOTPARALLEL:

help:
	@echo "make demo   lint a sample trace that has a fault, write demo/legacy.json"
	@echo "make test   check format, lint, types and layers, then run the tests"
	@echo "make docs   build the documentation: site/index.html"
	@echo "make pages  write pages anew that are made from rules, samples and commands"
	@echo "make fuzz   damage traces in ever new ways for a minute (SECONDS=60)"
	@echo "make lock   write $(LOCK) anew; with UPGRADE=--upgrade, newer versions"
	@echo "make clean  remove .venv and everything else that these targets write"

demo: .venv/installed
	@$(BIN)/streamlint lint $(DEMO) --exit-zero
	@mkdir -p demo
	@$(BIN)/streamlint lint $(DEMO) --exit-zero --format json --output demo/legacy.json
	@echo "The same result as JSON is in demo/legacy.json"

test: .venv/installed-test programs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q -n auto --dist loadgroup

# The tests build it as well. Not --quiet: mkdocs would overlook its warnings then. The
# variable silences a note about mkdocs' future.
docs: .venv/installed-test
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "The documentation is in site/index.html"

# A test fails for each part that is out of date.
pages: .venv/installed-test
	$(BIN)/python -m streamlint.docs
	$(BIN)/python docs/capture_tables.py
	$(BIN)/python docs/schema_tables.py
	$(BIN)/python docs/console.py
	$(BIN)/streamlint harness score --markdown > .calibration.md
	mv .calibration.md docs/calibration.md

# An input that breaks something is left as crash-*.
fuzz: .venv/installed-test
	$(BIN)/python tests/fuzz --seconds $(or $(SECONDS),60)

clean:
	rm -rf .venv build dist demo site streamlint.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/installed: pyproject.toml | $(BIN)/pip
	@echo "Installing streamlint into .venv ..."
	@$(PIP) install --editable .
	@touch $@

# Nothing is run that is not in the lock: no other version, no build of a package.
.venv/installed-test: pyproject.toml $(LOCK) | $(BIN)/pip
	@echo "Installing streamlint and its test tools into .venv ..."
	@$(PIP) install --require-hashes --only-binary :all: --requirement $(LOCK)
	@$(PIP) install --no-index --no-deps --no-build-isolation --editable .
	@touch .venv/installed $@

# For every Python and system at once, so that the lock is the same wherever it is made.
lock: | $(BIN)/pip
	@$(PIP) install uv
	$(BIN)/uv --quiet pip compile pyproject.toml --extra test --universal \
	  --python-version 3.10 --generate-hashes --no-annotate $(UPGRADE) \
	  --custom-compile-command "make lock" --output-file $(LOCK)

# Programs that tests drive. Without one its tests are skipped; those of pages not in CI.
programs:
	@missing="chromium chromium-driver"; \
	for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  ! command -v $$name >/dev/null || missing=; done; \
	for name in fish zsh; do \
	  command -v $$name >/dev/null || missing="$$missing $$name"; done; \
	[ -n "$$missing" ] || exit 0; \
	as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	if command -v apt-get >/dev/null && $$as_root true 2>/dev/null; then \
	  echo "Installing for the tests: $$missing ..."; \
	  $$as_root apt-get -qq update >/dev/null 2>&1; \
	  $$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
	    --no-install-recommends $$missing >/dev/null 2>&1 && exit 0; fi; \
	echo "note: not here, and can't be installed: $$missing"

# pip is the last thing that venv puts there, so a run cut short is made good.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: streamlint needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@$(PYTHON) -m venv .venv
