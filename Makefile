# Two commands do everything on a fresh clone: `make demo` and `make test`.
#
# PYTHON       the interpreter that makes .venv: 3.11, 3.12 or 3.13
# TORCH_INDEX  a second index for torch. On Linux the default index has a CUDA build of gigabytes;
#              TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the small CPU build of the same version,
#              .../whl/cu126 the build for CUDA 12.6, for older drivers and cards (docs/operations.md)
# DEMO_FLAGS   passed to `kd demo`, for example DEMO_FLAGS=--baseline
# TEST_FLAGS   passed to pytest, for example TEST_FLAGS="-k codec -x"
# TMPDIR       where tests write; without it in memory (/dev/shm), if 4 GiB are free there
# TEST_WORKERS processes that run tests, each with one arithmetic thread; tests marked alone follow in one process
# NAME         the bench that `make bench` runs; without it `make bench` lists the benches
# FLAGS        passed to the script of `make bench`, `make chaos` or `make test-hosts`, for example
#              make bench NAME=reader FLAGS="--quick --out table.md", make chaos FLAGS="--seed 7 --faults 1000"
# KD_DOCKER_BUILD_FLAGS  flags of `docker build` in `make test-containers`, for example "--network host"
# IMAGES       what `make release` does about the images: auto builds them where a Docker engine answers, yes fails
#              without one, no leaves them out
# LONG=1       `make test` also runs the tests marked long
# SLOW=1       `make test` also runs the tests marked long and slow
# FUZZ=1       `make test` only sends the API valid and invalid requests made from its OpenAPI document (schemathesis)
# EXAMPLES=1   `make test` only draws new examples of the property tests, for an hour; those that fail are kept and printed
# EXAMPLE_SECONDS  how long `make test EXAMPLES=1` begins new runs
# AUDIT=1      `make lint` also looks for known vulnerabilities: bandit, and pip-audit (needs a network)

PYTHON      ?= python3
TORCH_INDEX ?=
DEMO_FLAGS  ?=
TEST_FLAGS  ?=
TEST_WORKERS ?= 5
EXAMPLE_SECONDS ?= 3600
IMAGES      ?= auto
LONG        ?=
SLOW        ?=
FUZZ        ?=
EXAMPLES    ?=
AUDIT       ?=
# Some systems have variables of these names in the environment, which say nothing about a bench.
NAME        :=
FLAGS       :=

# With this variable every process of the tests would rewrite all test modules anew, which is half of
# the time in which it collects them.
unexport PYTHONDONTWRITEBYTECODE

BIN   := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.demo
PIP   := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
UNASKED = $(if $(SLOW),, and not slow)$(if $(SLOW)$(LONG)$(EXAMPLES),, and not long)
# Tests write and sync tens of thousands of small files, which takes less time in memory, if it has room, than on a disk.
TEST_TMP = $(or $(TMPDIR),$(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4194304' | grep -q . && \
	test -w /dev/shm && ! grep -q ' /dev/shm .*noexec' /proc/mounts && echo /dev/shm))
# Status 5 means that no test was selected, which TEST_FLAGS can cause in one of the two calls.
PYTEST = $(if $(TEST_TMP),TMPDIR=$(TEST_TMP) )OMP_NUM_THREADS=1 $(BIN)/pytest $(1) -m "$(2)$(UNASKED)" $(TEST_FLAGS) || test $$? = 5
# To collect the tests of all files takes half a minute; flags may name files of their own.
ALONE = $(shell grep -rl 'mark\.alone' tests --include='*.py')
CODE  := .ci cache kd services tests $(wildcard bench examples)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format docs site bench chaos test-hosts test-containers test-simulated-gpu release up clean

help: ## List the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

install: $(STAMP) ## Create .venv and install the pinned versions; instant when done already

# torch comes first and alone, so that no other package decides which build of it is taken.
define INSTALL
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit( \
	    f"Potstill needs Python 3.11 to 3.13, but $(PYTHON) is {v.major}.{v.minor}: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
endef

$(STAMP): EXTRAS := dev,gguf
$(STAMP): pyproject.toml constraints.txt
	$(INSTALL)
	@touch $(DEMO_STAMP) $@

# The demo needs no tools of development: a third of the packages.
$(DEMO_STAMP): EXTRAS := local,worker
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(INSTALL)
	@touch $@

demo: $(DEMO_STAMP) ## Distil a small teacher on this machine, through the whole service
	$(BIN)/kd demo $(DEMO_FLAGS)

test: $(STAMP) ## Run the tests; also LONG=1, SLOW=1, FUZZ=1, EXAMPLES=1
ifdef FUZZ
	KD_FUZZ_EXAMPLES=200 $(BIN)/pytest -n 0 tests/services/api/test_schemathesis.py
else ifdef EXAMPLES
# A failing example stays in .hypothesis, where the next run tries it first.
	@end=$$(($$(date +%s) + $(EXAMPLE_SECONDS))); failed=0; \
	while test $$(date +%s) -lt $$end; do \
	    $(call PYTEST,-n $(TEST_WORKERS) --hypothesis-profile=new,hypothesis) || failed=1; \
	done; exit $$failed
else
	$(call PYTEST,-n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder,not alone)
	$(call PYTEST,-n 0 $(if $(TEST_FLAGS),,$(ALONE)),alone)
endif

lint: $(STAMP) ## Check style, format and types; AUDIT=1 also looks for known vulnerabilities
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
ifdef AUDIT
	KD_AUDIT=1 $(BIN)/pytest -n 0 -k "bandit or hole" tests/system/test_security.py
endif

format: $(STAMP) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(STAMP) ## Write configuration.md, settings.md, cli.md, api.md and python.md from the descriptions in the code
	$(BIN)/python -m services.reference

site: $(STAMP) ## Build the documents as a site into build/site; a broken link is an error
	$(BIN)/python docs/site.py

bench: $(STAMP) ## List the benches, or run one: NAME=reader FLAGS="--quick"
	@$(BIN)/python -m bench $(NAME) $(FLAGS)

test-simulated-gpu: $(STAMP) ## Run the tests marked gpu on a simulated GPU, without kernels of Triton (C++ compiler, 4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.simulated_gpu -m pytest -n 0 -m gpu -k "not the_kernels and not each_kernel and not waited_for" $(TEST_FLAGS) tests/system/test_gpu.py tests/kd

test-containers: $(STAMP) ## Build the images and run the example through Compose, with kills (a Docker engine; half an hour)
	KD_TEST_CONTAINERS=1 $(BIN)/pytest -n 0 -s tests/system/deployment/test_engine.py

chaos: $(STAMP) ## Kill, stop and starve every part of the service while jobs run; print what broke (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python bench/chaos.py $(FLAGS)

test-hosts: $(STAMP) ## Run the service in network namespaces and cut, slow, freeze, kill and skew its hosts (root; 10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python bench/devices/hosts.py $(FLAGS)

release: $(STAMP) ## Build wheel, source archive, bill of materials, images and SHA256SUMS of this version into dist/
	$(BIN)/python .ci/release.py --images $(IMAGES)

up: $(STAMP) ## Run the service in this terminal until Ctrl-C: server, API, workers
	$(BIN)/kd up

clean: ## Remove .venv and the files of the tools; caches and runs stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
