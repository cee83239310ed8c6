# make train | test | test-all | lint | bench   (set PYTHON, TORCH or VENV to choose another interpreter or release)
PYTHON ?= python3
TORCH  ?=
VENV   ?= .venv$(if $(TORCH),-$(TORCH))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test test-all lint bench clean
.DELETE_ON_ERROR:

# A suitable torch that the interpreter already has is used as it is; otherwise the pinned one is installed.
$(READY): setup.py constraints.txt setup.sh
	PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) bash setup.sh
	touch $@

train: $(READY)
	$(BIN)/dualpipe train examples/tiny-cpu.toml

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .

bench: $(READY)
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/wgrad_split.py

clean:
	rm -rf .venv* build *.egg-info out
