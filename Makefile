# Needs nothing but Python (3.10 or newer) and make: every target creates .venv by itself.
# Settings pass through: `SSD_PORT=9000 make serve`, or `make serve ARGS="--port 9000 --mode sd"`.
# With AMD's driver `make serve` uses what ./setup_rocm.sh has prepared instead: the torch that is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv
ARGS ?=
comma := ,

NVIDIA ?= /dev/nvidiactl
KFD ?= /dev/kfd
# The GPU by the drivers' device files, unless settings ask for CPU cores.
CORES := $(filter 1 true True yes on,$(SSD_ALLOW_CPU)) $(filter cpu%,$(SSD_TARGET_DEVICE))
GPU := $(if $(strip $(CORES)),,$(if $(wildcard $(NVIDIA)),nvidia,$(if $(wildcard $(KFD)),amd)))
EXTRAS := [structured$(if $(filter nvidia,$(GPU)),$(comma)flashinfer$(comma)triton)]
CACHE := $(patsubst ~/%,$(HOME)/%,$(or $(SSD_CACHE_DIR),~/.cache/ssd-serve))

SERVING := $(VENV)/.stamp-serving$(if $(filter nvidia,$(GPU)),-nvidia)
DEVELOPING := $(VENV)/.stamp-developing
MEASURING := $(VENV)/.stamp-measuring

.DEFAULT_GOAL := help
.PHONY: help install serve demo test test-all tritons check mypy pyright prose format bench docs release clean

help:
	@echo "make serve     start the server (http://127.0.0.1:8000); fetches SmolLM2 (93 MB) once. Without a"
	@echo "               download: SSD_TARGET=embedded make serve, a toy model that answers nothing"
	@echo "make demo      the same, and opens the page in a browser: plain and speculative decoding side by side"
	@echo "make test      quick tests: no servers, no clusters, no long proofs"
	@echo "make test-all  every test; a skip for an unlisted reason is a failure"
	@echo "make tritons   compile the kernels for three GPUs with each Triton that a supported torch requires"
	@echo "make check     lint, format check, layers, types"
	@echo "make prose     language of docstrings and documents (ARGS=\"--list 20 PATH\" lists findings)"
	@echo "make bench     compare plain, synchronous and asynchronous speculation; needs an idle machine"
	@echo "make docs      write the documentation site to site/, with strict links"
	@echo "make install   only create $(VENV), with everything in it"
	@echo "make format    format the sources with ruff"
	@echo "make release   every check, then sdist and wheel in dist/ (CONTRIBUTING.md, Releases)"
	@echo "make clean     remove $(VENV) and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "ssd needs Python 3.10 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(SERVING): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e ".$(EXTRAS)"
	@touch $@

$(MEASURING): $(SERVING)
	$(PIP) install -c constraints.txt -e ".[bench]"
	@touch $@

$(DEVELOPING): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e ".$(EXTRAS:%]=%$(comma)dev])"
	@touch $(SERVING) $@

install: $(DEVELOPING)

ifeq ($(GPU),amd)
OTHERS_WRITE = \( ! -user "$$(id -u)" -o -perm -g+w -o -perm -o+w \)
# This shell runs rocm.env, so no other user may be able to write the file.
serve:
	@if [ ! -f "$(CACHE)/rocm.env" ]; then \
		echo "there is an AMD GPU ($(KFD)): run ./setup_rocm.sh first, or SSD_ALLOW_CPU=1 make serve for cores"; \
		exit 9; \
	elif [ -n "$$(find "$(CACHE)" "$(CACHE)/rocm.env" -prune $(OTHERS_WRITE))" ]; then \
		echo "others may write to $(CACHE)/rocm.env: delete it, chmod go-w $(CACHE), and run ./setup_rocm.sh again"; \
		exit 9; \
	fi; \
	. "$(CACHE)/rocm.env"; \
	exec $(if $(filter file,$(origin PYTHON)),"$$ROCM_PYTHON",$(PYTHON)) -m ssd_serve serve $(ARGS)
else
serve: $(SERVING)
	@exec $(BIN)/ssd serve $(ARGS)
endif

RACE = http://127.0.0.1:$(or $(SSD_PORT),8000)/\#race
# A browser is opened on a desktop only: elsewhere xdg-open would start one in this terminal.
OPENER := $(if $(filter Darwin,$(shell uname)),open,$(if $(DISPLAY)$(WAYLAND_DISPLAY),xdg-open))
demo: export SSD_TARGET := smollm2
demo: $(if $(filter amd,$(GPU)),,$(SERVING))
	@echo "the race is at $(RACE)"
	@$(if $(OPENER),{ sleep 3; $(OPENER) "$(RACE)"; } >/dev/null 2>&1 &,:)
	@$(MAKE) --no-print-directory serve

# Without compiled files on disk, each of hundreds of Python processes would compile the sources again.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(DEVELOPING)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" $(ARGS)

# One process runs a whole file, so that its servers start once. Three processes, because many tests wait.
test-all: $(DEVELOPING)
	CI=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# torch 2.9 needs Triton 3.5.1, 2.10 and 2.11 need 3.6, 2.12 needs 3.7, 2.14 needs 3.8. (3.4, of torch 2.8, links
# for AMD's GPUs only where ROCm is installed.)
TRITONS ?= 3.5.1 3.6.0 3.7.0 3.8.0
tritons: $(DEVELOPING)
	for each in $(TRITONS); do \
		echo "Triton $$each"; \
		$(PIP) install --quiet --upgrade --no-deps --target $(VENV)/triton-$$each triton==$$each; \
		PYTHONPATH=$(VENV)/triton-$$each TRITON_CACHE_DIR=$(VENV)/triton-$$each/cache \
			$(BIN)/python -m tests.kernels.triton_compilation 128 bf16 largest || exit 1; \
	done

check: $(DEVELOPING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/check_prose.py --check
	@$(MAKE) --no-print-directory -j2 mypy pyright

mypy pyright: $(DEVELOPING)
	$(BIN)/$@

prose: $(BIN)/python
	@$(BIN)/python tests/check_prose.py $(ARGS)

format: $(DEVELOPING)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(MEASURING)
	$(BIN)/ssd bench modes --json src/ssd_serve/bench/results/modes.json $(ARGS)

docs: $(DEVELOPING)
	$(BIN)/python -m mkdocs build --strict

# Publishes nothing: "Releases" in CONTRIBUTING.md has the steps before and after.
release: $(DEVELOPING)
	@test -z "$$(git status --porcelain)" || { echo "commit everything first"; exit 1; }
	@version=$$($(BIN)/python -c "from ssd_serve.base.version import __version__; print(__version__)"); \
	grep -q "^version = \"$$version\"" pyproject.toml || { echo "pyproject.toml has another version"; exit 1; }; \
	grep -Eq "^## \[$$version\] - [0-9-]+$$" CHANGELOG.md || { echo "CHANGELOG.md has no dated $$version"; exit 1; }
	$(MAKE) check test-all
	rm -rf dist
	$(PIP) install -q build
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest tests/end_to_end/test_wheel.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis
