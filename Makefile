# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv demo test check soak bench benchmarks-doc peers bench-peers gpu-check clean

venv: $(STAMP)

# The native kernels are part of the install, so their sources are among what it depends on.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/specdec/kernels/csrc/*) src/specdec/kernels/build.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --upgrade 'pip>=25' -c constraints.txt
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/specdec pull
	$(BIN)/specdec generate --compare --max-tokens 160 --prompt-file examples/correct.txt

test: venv
	$(BIN)/specdec pull
	$(BIN)/python -m pytest -n 2

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Random requests and cancels on a server for ten minutes: every answer right, and memory flat.
soak: venv
	SPECDEC_SOAK_SECONDS=600 $(BIN)/python -m pytest -s --timeout 1200 tests/serve/test_load.py -k flat

bench: venv
	$(BIN)/python bench/kernels.py
	$(BIN)/specdec bench

# docs/benchmarks.md and its plots, and what other pages show of results, from the files in bench/results.
benchmarks-doc: venv
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[bench]'
	$(BIN)/python bench/report.py

# The engines to compare with, each in an environment of its own below .peers (or SPECDEC_PEERS); ENGINES="..." picks some.
peers:
	$(PYTHON) bench/peers/install.py $(ENGINES)

bench-peers: venv
	$(BIN)/python bench/peers/run.py $(if $(ENGINES),--engines specdec $(ENGINES)) $(ARGUMENTS)

# Verifies and times the paths of an accelerator in less than four minutes; says so and passes where there is none.
gpu-check: venv
	$(BIN)/python -m pytest -m "gpu and not slow" tests/test_gpu.py tests/kernels/test_triton.py -rs
	$(BIN)/python bench/gpu.py --json bench/results/gpu.json

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src -name '*.so' -delete -o -name __pycache__ -type d -prune -exec rm -rf {} +
