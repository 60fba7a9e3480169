# make train: install and train on this machine. make test: install what the tests need, too, lint and run the quicker
# tests of every room. make test-all: all tests.
PYTHON ?= python3
# Many tests wait for deadlines: two cores have time for three. More, and deadlines that are not under test may pass.
TEST_PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled to bytecode when they are first imported, whatever the environment says: most of those that pip
# installs never are, and the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --progress-bar off --no-compile -c constraints.txt
# Two ways to install: what training needs, and all that the tests need. The latter serves for both.
USER := $(VENV)/.installed
DEVELOPER := $(VENV)/.installed-for-tests
export CMAKE_ARGS
# The core is compiled while pip waits for the network and the disk, and while the linters run.
MAKEFLAGS += -j2

.PHONY: train test test-rest test-all unit times lint format docs build clients wheels release asan tsan fuzz clean

train: $(if $(wildcard $(DEVELOPER)),$(DEVELOPER),$(USER))
	rm -rf build/first-run
	$(BIN)/hdpcomm train --context 16384 --compare static ddp --out build/first-run
	@printf 'the steps as planned and as measured, in pictures: '
	@$(BIN)/hdpcomm report build/first-run

PYTEST := $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: lint $(DEVELOPER)
	$(PYTEST) tests --part first

# What `make test` leaves out; CI runs it after that.
test-rest: $(DEVELOPER)
	.ci/spills
	$(PYTEST) tests --part rest

test-all: lint $(DEVELOPER)
	.ci/spills
	$(PYTEST) tests

# What needs no ranks.
unit: $(DEVELOPER)
	$(PYTEST) tests/unit --part first

# Measures the files of tests again; where nothing else runs.
times: $(DEVELOPER)
	$(PYTEST) tests --write-times

lint: $(VENV)/.packages-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	.ci/rooms
	.ci/style
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.packages-for-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

# The site, into build/site; its pictures come from tools/draw_docs.py.
docs: $(DEVELOPER)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Checks, distributions, the site beside those of earlier versions, and a tag; pushes nothing: tools/release.py.
release: $(DEVELOPER)
	PYTHONS="$(PYTHONS)" MAKEFLAGS= $(BIN)/python tools/release.py

build: $(DEVELOPER)

# What others' trainers and libraries do on this package, each in a virtual environment outside of this tree; docs/clients.md.
clients: $(DEVELOPER)
	rm -rf build/clients
	MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/clients .
	$(BIN)/python tests/clients/run.py --wheel build/clients/*.whl $(CLIENTS)

# The source distribution and a manylinux wheel for each interpreter that is here, tried in fresh environments, into build/wheels.
# CMAKE_ARGS=-DHDPCOMM_CUDA=OFF leaves out the CUDA code. Each takes some minutes and 5 GB for torch meanwhile.
PYTHONS ?= $(shell for version in 3.10 3.11 3.12 3.13 3.14; do python$$version -c 'import sys; print(sys.executable)' 2>/dev/null; done; true)
wheels:
	MAKEFLAGS= PYTHONS="$(PYTHONS)" .ci/packages build/wheels

# The tests with sanitizers (tools/sanitize.py says what they see), two files at a time. What races with something else
# shows now and then, so ThreadSanitizer runs tests/faults FAULT_RUNS times, each time in new processes.
THREADED := tests/unit/comm tests/unit/device tests/unit/nccl tests/unit/offload tests/ranks/comm tests/ranks/device tests/ranks/nccl
FAULT_RUNS ?= 20
SIDE_BY_SIDE = -n 2 --dist loadfile
SECONDS ?= 60

asan: $(DEVELOPER)
	$(BIN)/python tools/sanitize.py address $(SIDE_BY_SIDE) tests

tsan: $(DEVELOPER)
	$(BIN)/python tools/sanitize.py thread $(SIDE_BY_SIDE) $(THREADED)
	$(BIN)/python tools/sanitize.py thread --repeat $(FAULT_RUNS) $(SIDE_BY_SIDE) tests/faults

# Hostile peers, SECONDS seconds each, with AddressSanitizer.
fuzz: $(DEVELOPER)
	$(BIN)/python tools/sanitize.py address --fuzz $(SECONDS)

# The tools of [build-system].requires go into the virtual environment once, so that later builds are incremental and need
# no network. nvcc is a matter of its own: training on a machine without a GPU does without.
$(VENV)/.tools: pyproject.toml constraints.txt tools/requirements.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/requirements.py --build > $(VENV)/build-requires.txt
	$(INSTALL) --upgrade pip -r $(VENV)/build-requires.txt
	touch $@

$(VENV)/.nvcc: $(VENV)/.tools tools/hdpcomm_build.py
	$(BIN)/python tools/hdpcomm_build.py > $(VENV)/nvcc-requires.txt
	test ! -s $(VENV)/nvcc-requires.txt || $(INSTALL) -r $(VENV)/nvcc-requires.txt
	touch $@

SOURCES := $(shell git ls-files --cached --others --exclude-standard csrc CMakeLists.txt setup.py)
NVIDIA_DRIVER := $(wildcard /dev/nvidiactl /proc/driver/nvidia/version)
NVCC_OF_USER := $(if $(NVIDIA_DRIVER),$(VENV)/.nvcc)

# Two pips at a time could spoil the environment, so nvcc comes before the packages.
$(VENV)/.packages: $(VENV)/.tools | $(NVCC_OF_USER)
$(VENV)/.packages: EXTRAS := plot
$(VENV)/.packages-for-tests: EXTRAS := test lint docs
$(VENV)/.packages-for-tests: $(VENV)/.tools | $(VENV)/.nvcc
$(VENV)/.packages $(VENV)/.packages-for-tests:
	$(BIN)/python tools/requirements.py $(EXTRAS) > $@-requires.txt
	$(INSTALL) -r $@-requires.txt
	touch $@

$(VENV)/.core: $(VENV)/.tools $(NVCC_OF_USER) $(SOURCES)
$(VENV)/.core-for-tests: $(VENV)/.tools $(VENV)/.nvcc $(SOURCES)
# Ninja is to use all cores, not those that this make may.
$(VENV)/.core $(VENV)/.core-for-tests:
	MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# The core has been compiled by itself, since pip shows nothing of a build; for pip there is nothing left to compile.
$(USER): CMAKE_ARGS += -DHDPCOMM_CUDA=AUTO
$(DEVELOPER) $(VENV)/.packages-for-tests clients: CMAKE_ARGS += -DHDPCOMM_CUDA=ON -DHDPCOMM_WERROR=ON -DHDPCOMM_TESTING=ON
$(USER): $(VENV)/.core $(VENV)/.packages
$(DEVELOPER): $(VENV)/.core-for-tests $(VENV)/.packages-for-tests
$(USER) $(DEVELOPER):
	MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf build dist *.egg-info hdpcomm/_core*.so hdpcomm/testing/_native*.so $(VENV)
