# The verbs: setup, serve, lint, check, test, kernels, aot, gpu, protos, train-demo, router-environment.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.penstock-installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve lint check test kernels aot gpu gpu-carry protos train-demo router-environment

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "penstock: installing into .venv (torch and ray are large: minutes the first time)"
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	@touch $@

serve: setup
	@$(BIN)/penstock serve $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.generated

check: lint
	$(BIN)/python -m pytest -q -n 3 -m "not slow and not process and not cluster and not gpu and not interpreted"

test: setup
	$(BIN)/python -m pytest -q -n 2 -m "not process and not cluster and not gpu and not interpreted"
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "process or cluster"
	@$(MAKE) --no-print-directory kernels

# Triton reads the variable when it is imported: hence a run of their own.
kernels: setup
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m interpreted tests/kernels/interpreted tests/workers/gpu

# A router in an environment of its own: the packages of an image for routers, and the wheel.
router-environment: setup
	@$(PYTHON) -m venv --clear .venv/router-only
	@.venv/router-only/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@.venv/router-only/bin/python -m pip install --quiet --constraint constraints.txt \
	  --requirement requirements-router.txt
	@.venv/router-only/bin/python -m pip install --quiet --no-deps .
	ROUTER_ENVIRONMENT=.venv/router-only $(BIN)/python -m pytest -q tests/cluster/test_router_environment.py

aot: setup
	$(BIN)/python -m tests.aot

# On a machine with a GPU, with the Python that is there: nothing is installed. See docs/gpu.md.
gpu:
	@PYTHONPATH=.:build/gpu-site $(PYTHON) -m penstock.loadtests.gpu $(ARGS)

# What such a machine may lack, for its Python: into build/gpu-site, to be carried there.
GPU_PYTHON ?= 3.12
gpu-carry: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --target build/gpu-site --upgrade \
	  --python-version $(GPU_PYTHON) --only-binary=:all: pytest hypothesis

protos: setup
	$(BIN)/python -m tests.generated --write

train-demo: setup
	$(BIN)/python -m training.train $(ARGS)
