# The verbs: setup, serve, lint, check, test, long, fuzz, kernels, aot, gpu, protos, locks, sbom, train-demo,
# router-environment.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.penstock-installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup install serve lint check test long fuzz kernels aot gpu gpu-carry protos locks sbom train-demo router-environment

setup: $(STAMP)

# The stamp has the text of both files. A worktree whose .venv is a link to that of another checkout has
# newer files with the same text. Installing would make the other checkout import this one's modules.
$(STAMP): pyproject.toml constraints.txt
	@if cat $^ | cmp --silent - $@; then touch $@; else $(MAKE) --no-print-directory install; fi

install:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "penstock: installing into .venv (torch and ray are large: minutes the first time)"
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	@$(BIN)/python -m compileall -q -j 2 penstock  # pip does not for an editable install
	@cat pyproject.toml constraints.txt > $(STAMP)

serve: setup
	@$(BIN)/penstock serve $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.generated

check: lint
	$(BIN)/python -m pytest -q -n 3 -m "not slow and not long and not process and not cluster and not gpu and not interpreted"

# The files with tests that start processes, long ones first. Only these are collected, because the
# imports of all files take half a minute.
PROCESS_TESTS = $(shell grep -rlE --include='test_*.py' 'mark\.(process|cluster)\b' \
  tests/cluster tests/workers tests/loadtests tests | awk '!seen[$$0]++')

# Neighbouring tests stay in one process (worksteal), so that shared fixtures are made once.
test: setup
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not long and not process and not cluster and not gpu and not interpreted"
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder \
	  -m "(process or cluster) and not long" $(PROCESS_TESTS)
	@$(MAKE) --no-print-directory kernels

LONG_TESTS = $(shell grep -rlE --include='test_*.py' 'mark\.long\b' tests)

# The tests that `make test` leaves to CI.
long: setup
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "long and not cluster and not interpreted" \
	  $(LONG_TESTS)
	$(BIN)/python -m pytest -q -m "long and cluster" $(LONG_TESTS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m "long and interpreted" $(LONG_TESTS)

# Random and malformed requests to a router, in two processes. ARGS: --inputs N, --seed N.
fuzz: setup
	$(BIN)/python -m tests.fuzz $(ARGS)

# Triton reads the variable when it is imported: hence a run of their own.
kernels: setup
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m "interpreted and not long" \
	  tests/kernels/interpreted tests/workers/gpu

# A router in an environment of its own, as in its image: the packages of its lock, and the wheel.
# Locks are for Python 3.11 on Linux, x86-64.
router-environment: setup
	@$(PYTHON) -m venv --clear --without-pip .venv/router-only
	@$(BIN)/python -m pip --python .venv/router-only install --quiet --require-hashes \
	  --only-binary :all: --requirement locks/router.txt
	@$(BIN)/python -m pip --python .venv/router-only install --quiet --no-deps .
	@$(MAKE) --no-print-directory sbom SBOM_PYTHON=.venv/router-only/bin/python
	ROUTER_ENVIRONMENT=.venv/router-only SBOM=build/sbom.cdx.json $(BIN)/python -m pytest -q \
	  tests/test_sbom.py tests/cluster/test_router_environment.py

aot: setup
	$(BIN)/python -m tests.aot

# On a machine with a GPU, with the Python that is there: nothing is installed. See docs/gpu.md.
gpu:
	@PYTHONPATH=.:build/gpu-site $(PYTHON) -m penstock.loadtests.gpu $(ARGS)

# What such a machine may lack, for its Python: into build/gpu-site, to be carried there.
GPU_PYTHON ?= 3.12
gpu-carry: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --target build/gpu-site --upgrade \
	  --python-version $(GPU_PYTHON) --only-binary=:all: pytest pytest-xdist pytest-timeout hypothesis \
	  protobuf

# Versions and hashes of the packages of the images: needs the platform of the images and a network.
locks: setup
	$(BIN)/python -m tests.locks

# The packages of an environment as CycloneDX: build/sbom.cdx.json.
SBOM_PYTHON ?= $(BIN)/python
sbom: setup
	@$(PYTHON) -m venv --clear .venv/sbom
	@.venv/sbom/bin/python -m pip install --quiet --require-hashes --only-binary :all: \
	  --requirement locks/build.txt
	@mkdir -p build
	.venv/sbom/bin/cyclonedx-py environment --output-reproducible \
	  --output-file build/sbom.cdx.json $(SBOM_PYTHON)

protos: setup
	$(BIN)/python -m tests.generated --write

train-demo: setup
	$(BIN)/python -m training.train $(ARGS)
