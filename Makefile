# make train: install and train on this machine. make test: install what the tests need, too, lint and run the tests.
PYTHON ?= python3
# Most tests wait for processes of their own: two at a time take half the time.
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Two ways to install: what training needs, and all that the tests need. The latter serves for both.
USER := $(VENV)/.installed
DEVELOPER := $(VENV)/.installed-for-tests
export CMAKE_ARGS

.PHONY: train test lint format docs build clean

train: $(if $(wildcard $(DEVELOPER)),$(DEVELOPER),$(USER))
	$(BIN)/hdpcomm train --compare static ddp

test: lint
	.ci/spills
	$(BIN)/python -m pytest tests -q -n $(TEST_PROCESSES) --dist loadfile

lint: $(DEVELOPER)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	.ci/rooms
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(DEVELOPER)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

# The site, into build/site; its pictures come from tools/draw_docs.py.
docs: $(DEVELOPER)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

build: $(DEVELOPER)

# The tools of [build-system].requires go into the virtual environment once, so that later builds are incremental and need
# no network. nvcc is a matter of its own: training on a machine without a GPU does without.
REQUIRES := $(BIN)/python -c "from pip._vendor import tomli; print('\n'.join(tomli.load(open('pyproject.toml', 'rb'))['build-system']['requires']))"

$(VENV)/.tools: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(REQUIRES) > $(VENV)/build-requires.txt
	$(PIP) install --progress-bar off -c constraints.txt -r $(VENV)/build-requires.txt
	touch $@

$(VENV)/.nvcc: $(VENV)/.tools tools/hdpcomm_build.py
	$(BIN)/python tools/hdpcomm_build.py > $(VENV)/nvcc-requires.txt
	$(PIP) install --progress-bar off -c constraints.txt -r $(VENV)/nvcc-requires.txt
	touch $@

SOURCES := $(shell git ls-files --cached --others --exclude-standard csrc CMakeLists.txt setup.py)
NVIDIA_DRIVER := $(wildcard /dev/nvidiactl /proc/driver/nvidia/version)

$(USER): CMAKE_ARGS += -DHDPCOMM_CUDA=AUTO
$(USER): $(VENV)/.tools $(if $(NVIDIA_DRIVER),$(VENV)/.nvcc) $(SOURCES)
$(DEVELOPER): CMAKE_ARGS += -DHDPCOMM_CUDA=ON -DHDPCOMM_WERROR=ON -DHDPCOMM_TESTING=ON
$(DEVELOPER): EXTRAS := [test,lint,docs]
$(DEVELOPER): $(VENV)/.tools $(VENV)/.nvcc $(SOURCES)

# The core is compiled first, by itself, since pip shows nothing of a build; for pip there is nothing left to compile.
$(USER) $(DEVELOPER):
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --progress-bar off -c constraints.txt --no-build-isolation -e '.$(EXTRAS)'
	touch $@

clean:
	rm -rf build dist *.egg-info hdpcomm/_core*.so hdpcomm/_testing*.so $(VENV)
