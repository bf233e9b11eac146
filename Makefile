# Two commands do all the set-up on a fresh machine: `make quickstart` and `make test`.
VENV ?= .venv
BIN := $(VENV)/bin
# The first that runs of the versions TensorFlow and this project support.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# Where the quick start writes, and how many steps it makes.
QUICKSTART_DIR ?= runs/quickstart
QUICKSTART_STEPS ?= 1100

.PHONY: quickstart test test-slow campaign lint docs

quickstart: $(VENV)/ready
	$(BIN)/python tokenizer_training/train_unigram.py --dataset-name builtin --validation-percent 2 \
		--vocab-size 4096 --max-bytes 4000000 --output-dir $(QUICKSTART_DIR)/tokenizer
	$(BIN)/python tfrecord_prep/prepare_tfrecord_shards.py \
		--tokenizer-name-or-path $(QUICKSTART_DIR)/tokenizer --max-length 64 --output-dir $(QUICKSTART_DIR)/shards
	$(BIN)/python train/run_mlm.py --preset tiny-cpu --train-dataset $(QUICKSTART_DIR)/shards/train \
		--eval-dataset $(QUICKSTART_DIR)/shards/validation --max-steps $(QUICKSTART_STEPS) \
		--output-dir $(QUICKSTART_DIR)/model
	$(BIN)/python train/fill_mask.py --model $(QUICKSTART_DIR)/model/export

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow -n auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder

# Every fault in every stage; writes the table of docs/design/reliability.md.
campaign: $(VENV)/installed
	rm -f campaign.jsonl
	$(BIN)/python -m pytest tests/campaign -m slow --num-kills 100 --campaign-report campaign.jsonl -n 2 \
		--dist loadfile --no-loadscope-reorder
	$(BIN)/python -m tests.campaign.report campaign.jsonl docs/design/reliability.md
	rm campaign.jsonl

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The site, in build/site. Needs the extra `docs`.
docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What the quick start needs; the tests need more. Modules are compiled when they are imported: few of them are.
$(VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: Python 3.10, 3.11 or 3.12 is needed; name it by PYTHON=…" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[cpu]'
	touch $@

$(VENV)/installed: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[cpu,test]'
	touch $@
