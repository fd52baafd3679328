# Two commands do everything on a fresh clone: `make demo` and `make test`.
#
# PYTHON       the interpreter that makes .venv: 3.11, 3.12 or 3.13
# TORCH_INDEX  a second index for torch. On Linux the default index has a CUDA build of gigabytes;
#              TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the small CPU build of the same version,
#              .../whl/cu126 the build for CUDA 12.6, for older drivers and cards (docs/operations.md)
# DEMO_FLAGS   passed to `kd demo`, for example DEMO_FLAGS=--baseline
# TEST_FLAGS   passed to pytest, for example TEST_FLAGS="-k codec -x"
# TEST_WORKERS processes that run tests, each with one arithmetic thread; tests marked alone follow in one process
# BENCH_FLAGS  passed to `make bench` and the other benches, for example BENCH_FLAGS="--out table.md"
# TEMPERATURE_FLAGS  passed to bench/temperature.py, for example TEMPERATURE_FLAGS="--seeds 1 --steps 100"
# READER_FLAGS  passed to bench/reader.py, for example READER_FLAGS="--quick"
# ROOFLINE_FLAGS  passed to bench/roofline.py, for example ROOFLINE_FLAGS="--measure"
# GPU_PAGES    where `make bench-gpu` writes its pages and logs
# GPU_FLAGS    passed to bench/gpu/everything.py, for example GPU_FLAGS="--minutes 20 --parts rates"
# CHAOS_FLAGS  passed to `make chaos`, for example CHAOS_FLAGS="--seed 7 --faults 1000"
# KD_DOCKER_BUILD_FLAGS  flags of `docker build` in `make test-containers`, for example "--network host"
# IMAGES       what `make release` does about the images: auto builds them where a Docker engine answers, yes fails
#              without one, no leaves them out
# EXAMPLE_SECONDS  how long `make examples` begins new runs
# LONG=1       `make test` also runs the tests marked long
# SLOW=1       `make test` also runs the tests marked long and slow

PYTHON      ?= python3
TORCH_INDEX ?=
DEMO_FLAGS  ?=
TEST_FLAGS  ?=
BENCH_FLAGS ?=
TEMPERATURE_FLAGS ?=
READER_FLAGS ?=
ROOFLINE_FLAGS ?=
GPU_PAGES   ?= gpu-pages
GPU_FLAGS   ?=
CHAOS_FLAGS ?=
TEST_WORKERS ?= 4
EXAMPLE_SECONDS ?= 3600
IMAGES      ?= auto
LONG        ?=
SLOW        ?=

# With this variable every process of the tests would rewrite all test modules anew, which is half of
# the time in which it collects them.
unexport PYTHONDONTWRITEBYTECODE

BIN   := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.demo
PIP   := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
UNASKED = $(if $(SLOW),, and not slow)$(if $(SLOW)$(LONG),, and not long)
# Status 5 means that no test was selected, which TEST_FLAGS can cause in one of the two calls.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest $(1) -m "$(2)$(UNASKED)" $(TEST_FLAGS) || test $$? = 5
# To collect the tests of all files takes half a minute; flags may name files of their own.
ALONE = $(shell grep -rl 'mark\.alone' tests --include='*.py')
CODE  := .ci cache kd services tests $(wildcard bench examples)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format docs site bench bench-reader bench-dataloader bench-capture bench-forecast bench-scale-model bench-plan bench-cache bench-bias bench-quality bench-train bench-temperature bench-products bench-service bench-roofline bench-kernels bench-gpu bench-scale bench-tokens bench-in-part bench-manifest bench-ui \
        test-simulated-gpu test-containers chaos test-hosts fuzz examples sbom release audit up clean

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

test: $(STAMP) ## Run the tests
	$(call PYTEST,-n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder,not alone)
	$(call PYTEST,-n 0 $(if $(TEST_FLAGS),,$(ALONE)),alone)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(STAMP) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(STAMP) ## Write docs/configuration.md, api.md, cli.md, settings.md and python.md from the descriptions in the code
	$(BIN)/python -m kd.config.reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(BIN)/python -m services.api.reference > docs/api.md.new
	mv docs/api.md.new docs/api.md
	$(BIN)/python -m services.reference > docs/settings.md.new
	mv docs/settings.md.new docs/settings.md
	$(BIN)/python -m services.terminal.reference > docs/cli.md.new
	mv docs/cli.md.new docs/cli.md
	$(BIN)/python -m kd.face.reference > docs/python.md.new
	mv docs/python.md.new docs/python.md

site: $(STAMP) ## Build the documents as a site into build/site; a broken link is an error
	$(BIN)/python docs/site.py

bench: $(STAMP) ## Measure the speed of capture, training and loading, as ratios within one run; then do bench-reader
	$(BIN)/python bench/speed.py $(BENCH_FLAGS)
	$(BIN)/python bench/reader.py $(READER_FLAGS)

bench-reader: $(STAMP) ## Measure how fast a cache is read, cold and warm, beside a plain read of its files
	$(BIN)/python bench/reader.py $(READER_FLAGS)

bench-tokens: $(STAMP) ## Measure the tokenizing into a token store, beside the bare tokenizer, and its memory
	$(BIN)/python bench/text/tokens.py $(BENCH_FLAGS)

bench-in-part: $(STAMP) ## Capture a part of a large text, extend it, verify it and train on it; prints the memory of each process
	$(BIN)/python bench/text/in_part.py $(BENCH_FLAGS)

bench-ui: $(STAMP) ## Measure what a user of the dashboard waits for, in headless Chromium (2 minutes)
	$(BIN)/python bench/interface/dashboard.py $(BENCH_FLAGS)

bench-manifest: $(STAMP) ## Measure how a cache of 1e12 tokens opens, and how fast a step's sequences are found (2 minutes)
	$(BIN)/python bench/loops/manifest.py $(BENCH_FLAGS)

bench-dataloader: $(STAMP) ## Measure a DataLoader with workers over a cache, beside the reader of the training loop
	$(BIN)/python bench/loops/dataloader.py $(BENCH_FLAGS)

bench-store: $(STAMP) ## Measure how fast a student reads its cache from a bucket, beside the disk (2 minutes)
	$(BIN)/python bench/stores/reading.py $(BENCH_FLAGS)

bench-capture: $(STAMP) ## Measure how much of its work a capture hides behind a simulated device (3 minutes)
	$(BIN)/python bench/capture.py $(BENCH_FLAGS)

bench-forecast: $(STAMP) ## Compare what kd estimate and kd plan tell with what some jobs take (10 minutes)
	$(BIN)/python bench/forecast.py $(BENCH_FLAGS)

bench-scale-model: $(STAMP) ## Print what a step is expected to cost on 8 to 1,024 GPUs; needs no GPU
	$(BIN)/python bench/devices/scale_model.py $(BENCH_FLAGS)

bench-plan: $(STAMP) ## Measure what kd plan --tokens counts with and no other bench prints
	$(BIN)/python bench/devices/plan_rates.py $(BENCH_FLAGS)

bench-cache: $(STAMP) ## Measure bytes and closeness of caches, beside the formats of other tools
	$(BIN)/python bench/records.py $(BENCH_FLAGS)

bench-bias: $(STAMP) ## Measure the bias of sampled records on real text, by decade of probability
	$(BIN)/python bench/bias.py $(BENCH_FLAGS)

bench-quality: $(STAMP) ## Train students of each kind of record, and print their shares of full distillation (hours)
	$(BIN)/python bench/quality.py $(BENCH_FLAGS)

bench-train: $(STAMP) ## Measure the training loop (10 minutes on two cores), then do bench-temperature
	$(BIN)/python bench/train.py $(BENCH_FLAGS)
	$(BIN)/python bench/temperature.py $(TEMPERATURE_FLAGS)

bench-temperature: $(STAMP) ## Compare learned temperatures with the best fixed one (an hour on two cores)
	$(BIN)/python bench/temperature.py $(TEMPERATURE_FLAGS)

bench-products: $(STAMP) ## Print the errors of the LM head's products, and the bytes that chunks of logits move (minutes)
	$(BIN)/python bench/products.py $(BENCH_FLAGS)

bench-service: $(STAMP) ## Measure the API under load, with thousands of jobs stored and hundreds of streams open
	$(BIN)/python bench/service.py $(BENCH_FLAGS)

bench-roofline: $(STAMP) ## Print the expected rates of some GPUs; ROOFLINE_FLAGS=--measure runs the stages here, beside them
	$(BIN)/python bench/roofline.py $(ROOFLINE_FLAGS)

bench-kernels: $(STAMP) ## Print launches and waits of the hot path, and the kernels as compiled for some GPUs; needs no GPU
	$(BIN)/python bench/gpu/launches.py
	$(BIN)/python bench/gpu/kernel_builds.py

bench-gpu: $(STAMP) ## On a machine with a GPU: its tests, rates, speed, and a job of real size, in 9 minutes
	$(BIN)/python bench/gpu/everything.py --out $(GPU_PAGES) $(GPU_FLAGS)

bench-scale: $(STAMP) ## Measure what two and four ranks, and as many workers of a capture, gain on this machine
	$(BIN)/python bench/devices/scale.py $(BENCH_FLAGS)
	$(BIN)/python bench/devices/capture_workers.py

test-simulated-gpu: $(STAMP) ## Run the tests marked gpu on a simulated GPU, without kernels of Triton (C++ compiler, 4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.simulated_gpu -m pytest -n 0 -m gpu -k "not the_kernels and not each_kernel and not waited_for" $(TEST_FLAGS) tests/system/test_gpu.py tests/kd

test-containers: $(STAMP) ## Build the images and run the example through Compose, with kills (a Docker engine; half an hour)
	KD_TEST_CONTAINERS=1 $(BIN)/pytest -n 0 -s tests/system/deployment/test_engine.py

chaos: $(STAMP) ## Kill, stop and starve every part of the service while jobs run; print what broke (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python bench/chaos.py $(CHAOS_FLAGS)

test-hosts: $(STAMP) ## Run the service in network namespaces and cut, slow, freeze, kill and skew its hosts (root; 10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python bench/devices/hosts.py $(CHAOS_FLAGS)

fuzz: $(STAMP) ## Send the API valid and invalid requests made from its OpenAPI document (schemathesis)
	KD_FUZZ_EXAMPLES=200 $(BIN)/pytest -n 0 tests/services/api/test_schemathesis.py

# A failing example stays in .hypothesis, where the next run of this target tries it first.
examples: LONG := 1
examples: $(STAMP) ## Draw new examples of the property tests for an hour; those that fail are kept and printed
	@end=$$(($$(date +%s) + $(EXAMPLE_SECONDS))); failed=0; \
	while test $$(date +%s) -lt $$end; do \
	    $(call PYTEST,-n $(TEST_WORKERS) --hypothesis-profile=new,hypothesis) || failed=1; \
	done; exit $$failed

sbom: $(STAMP) ## Write sbom.json, the CycloneDX bill of materials
	$(BIN)/python .ci/release.py --bill sbom.json

release: $(STAMP) ## Build wheel, source archive, bill of materials, images and SHA256SUMS of this version into dist/
	$(BIN)/python .ci/release.py --images $(IMAGES)

audit: $(STAMP) ## Look for known vulnerabilities: bandit, and pip-audit (needs a network)
	KD_AUDIT=1 $(BIN)/pytest -n 0 -k "bandit or hole" tests/system/test_security.py

up: $(STAMP) ## Run the service in this terminal until Ctrl-C: server, API, workers
	$(BIN)/kd up

clean: ## Remove .venv and the files of the tools; caches and runs stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
