# Every target works in a fresh clone: the first one run makes .venv and installs into it.
#   make demo      train the GPT example on two ranks over an emulated link, before and after
#   make test      ruff, mypy and every test but the slow ones (what CI runs)
#   make test-all  the same with the slow tests, public models and more random examples: two hours
#   make bench     the benchmarks
#   make lint      ruff and mypy alone
#   make clean     remove caches and build outputs; .venv stays
# `make PYTHON=python3.12 …` chooses the interpreter .venv is made with.

PYTHON ?= python3
PY := .venv/bin/python
INSTALLED := .venv/.overlapc-installed
# Versions of megatron-core that tests and the example train with, each in a folder of its own.
MEGATRON := 0.16.1 0.19.2
# For tests, without what it reads data and logs with.
TORCHTITAN := torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 tokenizers==0.23.3 \
  tyro==1.0.17 spmd_types==0.2.3 typeguard==4.6.1 docstring_parser==0.18.0 shtab==1.13.0

.PHONY: demo test test-all bench lint clean

demo: $(INSTALLED)
	$(PY) examples/gpt/train.py --ranks 2 --link emulated --compare

# Two processes share the tests. Those that start ranks come by themselves: these use both cores.
test: lint
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow" tests/plain tests/torch
	$(PY) -m pytest -n 3 --dist worksteal -m "not slow" tests/multiprocess tests/megatron tests/torchtitan

test-all: lint
	$(PY) -m pip install -c constraints.txt -e '.[dev,zoo]'
	$(PY) -m pytest -n 3 --dist worksteal --hypothesis-profile=thorough

bench: $(INSTALLED)
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/scale.py
	$(PY) benchmarks/link_bench.py --model gpt
	$(PY) benchmarks/link_bench.py --model moe

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# A .venv made by hand is used as it is. torch comes first, so that one already there, a CPU
# build for instance, is found good before anything else asks for it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo 'overlapc needs Python 3.10 or newer; name one: make PYTHON=python3.11 ...' >&2; \
	    exit 1; }; \
	  echo '$(PYTHON) -m venv .venv'; $(PYTHON) -m venv .venv; }
	$(PY) -m pip install -c constraints.txt torch==2.13.0
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	@for version in $(MEGATRON); do \
	  test -d .venv/megatron/$$version || $(PY) -m pip install --quiet --no-deps \
	    --ignore-requires-python --only-binary :all: --target .venv/megatron/$$version \
	    megatron-core==$$version || \
	    echo "no megatron-core $$version for this Python: tests that need it are skipped" >&2; \
	done
	@test -d .venv/torchtitan || $(PY) -m pip install --quiet --no-deps \
	  --target .venv/torchtitan $(TORCHTITAN) || \
	  echo "no torchtitan for this Python: tests that need it are skipped" >&2
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(INSTALLED)
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
