# make train: install and train on this machine. make test: install, lint and run the tests.
PYTHON ?= python3
# Most tests wait for processes of their own: two at a time take half the time.
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CMAKE_ARGS += -DHDPCOMM_WERROR=ON
export CMAKE_ARGS

.PHONY: train test lint format build clean

train: $(STAMP)
	$(BIN)/hdpcomm train

test: lint
	.ci/spills
	$(BIN)/python -m pytest tests -q -n $(TEST_PROCESSES) --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	.ci/rooms
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

# The tools of [build-system].requires go into the virtual environment once, so that later builds are incremental and need no network.
$(VENV)/.tools: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "from pip._vendor import tomli; print('\n'.join(tomli.load(open('pyproject.toml', 'rb'))['build-system']['requires']))" > $(VENV)/build-requires.txt
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -r $(VENV)/build-requires.txt
	touch $@

SOURCES := $(shell git ls-files --cached --others --exclude-standard csrc CMakeLists.txt setup.py)
$(STAMP): $(VENV)/.tools $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --progress-bar off -c constraints.txt --no-build-isolation -e '.[test,lint]'
	touch $@

build: $(STAMP)

clean:
	rm -rf build dist *.egg-info hdpcomm/_core*.so $(VENV)
