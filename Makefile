VENV ?= .venv
BIN := $(VENV)/bin
# The first that runs of the versions that the project supports; with another one, install.py finds or fetches a fitting one.
PYTHON ?= $(or $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done),python3)
INSTALL = $(PYTHON) install.py --environment $(VENV)
# Where the quick start writes, and how many steps it trains.
QUICKSTART_DIR ?= runs/quickstart
QUICKSTART_STEPS ?= 600

# What `make test-python` runs, in an environment of its own: what depends on the version of Python and takes a minute.
PYTHON_TESTS ?= tests/documents/test_imports.py tests/documents/test_flags.py tests/mlm_common/cli \
	tests/tfrecord_prep/test_records.py tests/tfrecord_prep/test_segment_pairs.py tests/tfrecord_prep/test_chunking.py \
	tests/train/test_config.py tests/train/test_recipes.py \
	tests/train/runtime/test_jax_runtime.py::test_eight_replicas_make_the_steps_of_one \
	tests/train/runtime/test_jax_runtime.py::test_a_function_may_capture_tensors_and_return_any_structure
PYTHON_ENVIRONMENT = build/$(notdir $(PYTHON))
# What `make test-newest` takes the newest of: all that pyproject.toml gives an upper bound.
NEWEST = datasets google-cloud-storage huggingface-hub tensorboard tensorflow tf-keras tokenizers transformers

# Where this is set, as in many containers, each command would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-python test-legacy test-newest lint docs campaign environment

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-12s %s\n", $$1, $$2 }'

quickstart:  ## install, then train a tiny model from text to filled-in words: 4 minutes on two cores
	@$(PYTHON) quickstart.py --environment $(VENV) --output-dir $(QUICKSTART_DIR) --max-steps $(QUICKSTART_STEPS)

test: lint  ## check the code and run the tests: 10 minutes
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: environment  ## run the tests that take many seconds or minutes each
	$(BIN)/python -m pytest -m slow -n auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder

test-python:  ## run the quick tests with PYTHON=python3.13; with PYTHON_TESTS='tests -n auto' all of them
	@$(PYTHON) install.py --environment $(PYTHON_ENVIRONMENT) --extra cpu --with test
	$(PYTHON_ENVIRONMENT)/bin/python -m pytest $(PYTHON_TESTS)

test-legacy:  ## run the tests of the oldest transformers that is supported: ALBERT, DeBERTa, MPNet ... compute by it
	@$(PYTHON) install.py --environment build/legacy --extra cpu --with legacy test
	build/legacy/bin/python -m pytest -m 'not tpu' @tests/legacy_tests.txt -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-newest:  ## run the tests with the newest of everything, whatever pyproject.toml allows, and say what that is
	@$(PYTHON) install.py --environment build/newest --extra cpu --with test
	build/newest/bin/python -m pip install --quiet --upgrade $(NEWEST)
	-build/newest/bin/python -m pip check
	build/newest/bin/python -m pip list | grep -E "^($(subst $() ,|,$(subst -,[-_],$(NEWEST)))) "
	build/newest/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: environment  ## check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs:  ## build the documentation in build/site
	@$(INSTALL) --extra cpu --with docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Every fault in every stage; writes the table of docs/design/reliability.md.
campaign: environment  ## kill and break every stage 100 times, and every command: an hour
	rm -f campaign.jsonl
	$(BIN)/python -m pytest tests/campaign -m slow --num-kills 100 --campaign-report campaign.jsonl -n 2 \
		--dist loadfile --no-loadscope-reorder
	$(BIN)/python -m tests.campaign.report campaign.jsonl docs/design/reliability.md
	rm campaign.jsonl

environment:
	@$(INSTALL) --extra cpu --with test
