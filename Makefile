# make train | test | test-slow | test-all | test-idle | test-gpu | lint | docs | reference | bench | wheels | gpu | gpu-node
# make clean removes what these have made.
# PYTHON=python3.12 chooses an interpreter (for a new .venv: `make clean` first), TORCH=2.15.0 another release of torch
# (in an environment of its own), WORKERS=1 how many tests run at once, MATRIX_PART=3 another part of the matrices.
# Where there is a folder wheels/, which `make wheels` fills, everything is installed from it, without a package index.
PYTHON ?= python3
TORCH  ?=
VENV   ?= .venv$(if $(TORCH),-$(TORCH))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
WHEELS ?= $(if $(wildcard wheels/*.whl),wheels)
SETUP   = PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) WHEELS=$(WHEELS) EXTRA=$(1) bash setup.sh

# What `make wheels` downloads for: a GPU machine that has torch and no package index.
TARGET    ?= 3.12
PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux2014_x86_64 manylinux_2_17_x86_64

# -P keeps the repository's root off sys.path, where kernels/ would shadow the Hugging Face package. Modules, because a
# tool that comes with an interpreter's own packages has no script in $(BIN). One worker more than there are cores, as
# tests wait a lot. More are slower: each worker collects all tests and starts a server of ranks, in 10 s of CPU time.
# Bytecode is kept: without, each worker compiles all tests, and each rank those that it runs.
WORKERS ?= $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
PYTEST  := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -P -m pytest --numprocesses $(WORKERS) \
               --maxprocesses 8 --dist worksteal

# test-slow runs two cases of each slow test and a 14th of the test matrices, chosen by the date. Tests marked `long`, of
# about half a minute or more, run in test-all alone, as does the interpreted matrix of the kernels, which takes hours.
MATRIX_PART ?= $(shell expr $$(date +%s) / 86400 % 14)

.PHONY: train test test-slow test-all test-idle test-gpu lint docs reference bench wheels gpu gpu-node clean

$(READY): pyproject.toml setup.py setup.sh constraints.txt
	$(call SETUP,viz)
	touch $@

# What the tests, the linters and the documents need besides, in the same environment.
$(READY)-test $(READY)-lint $(READY)-docs: $(READY)-%: $(READY)
	$(call SETUP,$*)
	touch $@

$(READY)-test: tests/s3-requirements.txt tests/schedule-requirements.txt

train: $(READY)
	$(BIN)/dualpipe train examples/tiny-cpu.toml

test: $(READY)-test
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: $(READY)-test
	@echo "part $(MATRIX_PART) of the cases; MATRIX_PART=$(MATRIX_PART) runs the same ones again"
	$(PYTEST) -m "slow and not long and not idle and not gpu" --durations 15 --matrix-part $(MATRIX_PART) $(ARGS)

test-all: $(READY)-test
	$(PYTEST) -m "not idle and not gpu" $(ARGS)

# Tests that time steps, which CI cannot: by hand, on two idle cores, after a change of what `dualpipe plan` predicts.
# One file, as to collect all tests is load enough.
test-idle: $(READY)-test
	$(PYTEST) --numprocesses 0 -m idle -rs -s tests/plan/test_cpu_runs.py $(ARGS)

# Those that need a GPU, all cases, one after the other, as they share the card; --gpu-cases 4 runs a few of each test.
test-gpu: $(READY)-test
	$(PYTEST) --numprocesses 0 -m gpu -rs $(ARGS)

# What is written from the code: docs/config.md, docs/cli.md, and the pictures of schedules.
reference: $(READY)-test
	$(BIN)/python docs/generate/reference.py

# lint-imports reads the sources by import name: there, kernels/ and models/ are in dualpipe/.
lint: $(READY)-lint
	$(BIN)/python -P -m ruff check .
	$(BIN)/python -P -m mypy
	rm -rf out/imports && mkdir -p out/imports && cp -r dualpipe out/imports && cp -r kernels models out/imports/dualpipe
	cd out/imports && $(abspath $(BIN))/python -P -c "from importlinter.cli import lint_imports_command; \
	    lint_imports_command()" --no-cache --no-logo $(CURDIR)/pyproject.toml

# The documents as a site, in out/site. A page that is not current, or a link that leads nowhere, is an error.
docs: $(READY)-docs
	$(BIN)/python docs/generate/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs build --strict

# Those that need a GPU say so where there is none. A missed goal does not keep the others from running.
bench: $(READY)
	@status=0; for script in wgrad_split engine_overhead $(notdir $(basename $(wildcard benchmarks/bench_*.py))); do \
	    echo "== $$script"; $(BIN)/python benchmarks/$$script.py $(ARGS) || status=1; \
	done; exit $$status

wheels:
	PYTHON=$(PYTHON) WHEELS=wheels TARGET=$(TARGET) PLATFORMS="$(PLATFORMS)" bash wheels.sh

# One card in ten minutes, and a machine of eight: correctness, then times, into out/gpu/session.json. See docs/gpu.md.
gpu gpu-node: $(READY)-test
	$(BIN)/python -P benchmarks/gpu_session.py $(if $(findstring node,$@),--node) $(ARGS)

clean:
	rm -rf .venv* build *.egg-info out
