# One target a job; `.ci/run` calls `make test` and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CARGO := cargo

.PHONY: help demo test check test-rust build build-for-tests test-python test-python-alone test-python-buckets stubs sdist bench compare clean

help: ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: build ## Train a GPT, kill it at random, and compare it bit for bit with a run that was never touched
	$(BIN)/python examples/demo.py

test: check test-rust build-for-tests stubs test-python sdist ## Everything that has to pass before a change lands

check: $(VENV)/.tools ## Format and lints of both languages
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets --features kill-points,cloud,encryption -- -D warnings
	$(CARGO) clippy --locked --features python,kill-points -- -D warnings
	$(CARGO) check --locked
	$(BIN)/ruff format --check python tests/python examples benches
	$(BIN)/ruff check python tests/python examples benches

test-rust: ## The engine alone, without Python in the graph
	$(CARGO) test --locked --features kill-points,cloud,encryption

build: $(VENV)/.tools ## The extension, built into `python/varvite` and installed in the virtual environment
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked

build-for-tests: $(VENV)/.tools ## The extension with kill points: tests end the process at named points of a save
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release --locked --features python,kill-points

stubs: build-for-tests ## The stub against the built module, types of the Python layer
	$(BIN)/python -m mypy.stubtest varvite._native --allowlist tests/python/stubtest_allowlist.txt --ignore-unused-allowlist
	$(BIN)/mypy

test-python: build-for-tests ## The Python layer, its docstrings and the documents' examples, and beside them the buckets
	$(MAKE) --jobs=2 --output-sync=target test-python-alone test-python-buckets

test-python-alone:
	$(BIN)/pytest --ignore=tests/python/buckets

test-python-buckets: # most of their time they wait: for servers, and for what is to be late
	$(BIN)/pytest tests/python/buckets

sdist: $(VENV)/.tools ## The source distribution, built and used in an empty environment
	rm -rf target/sdist && mkdir -p target/sdist
	$(BIN)/maturin sdist --out target/sdist
	$(PYTHON) -m venv target/sdist/venv
	CARGO_TARGET_DIR=$(abspath target) target/sdist/venv/bin/pip install --quiet target/sdist/*.tar.gz
	cd target/sdist && venv/bin/python -c "import varvite, tempfile; m = varvite.CheckpointManager(tempfile.mkdtemp()); m.save_sync(1, {'a': [1, 2]}); print(m.load())"

bench: ## Throughput of the kernels, of casts and statistics, of the codecs, and of the join of ranks
	$(CARGO) bench --locked

compare: build ## Varvite beside its peers, with the machine's raw limits of the same run
	$(BIN)/python benches/compare.py

clean: ## Everything that was built
	rm -rf target $(VENV) demo-run spot-run benchmark-run

$(VENV)/.tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --group dev click rich torch numpy
	touch $@
