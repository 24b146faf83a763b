# Making LLMs Fast. `make lab` and `make test` each work as the first command on a fresh machine with Python >= 3.11 and make.

VENV   ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
                    "$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done)
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check
# CPU=1 takes PyTorch's build without CUDA on a Linux machine that has no NVIDIA GPU: a tenth of the download.
PIP_INDEX = $(if $(CPU),--extra-index-url https://download.pytorch.org/whl/cpu)
# pip would compile what it installs on one core, which takes as long as the rest; compileall takes all cores. (Some packages
# hold files that no Python compiles; that is no failure. Their tests and models are left to whoever imports them.)
INSTALL = $(PIP) install -q --no-compile $(PIP_INDEX) -c constraints.txt $(1) && \
          { $(BIN)/python -m compileall -q -j 0 -x '/(tests?|models|openai/types|_inductor)/' $(VENV)/lib >/dev/null || true; }
JOBS   ?= 2
# The whole course is served, and the first notebook is open.
SERVER  = --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/01_gpu_model.ipynb
ALL     = $(wildcard notebooks/*.ipynb solutions/*/*.ipynb)
# Those that take longest come first, so that the last ones end together.
LONG    = $(foreach n,10 08 11 14 09 04 13,$(filter notebooks/$(n)_%,$(ALL)))
NOTEBOOKS ?= $(LONG) $(filter-out $(LONG),$(ALL))
TRITON ?= 3.9.0
# Where `make grade` puts the gradebook and everything else.
OUT    ?= grades

.DEFAULT_GOAL := help
.PHONY: help lab test check labs notebooks measure claims format runtime test-compat clean check-lab grade test-grading mutate site

help:  ## show this list
	@echo "Making LLMs Fast: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- the environment: made once, renewed when a requirement changes -------------------------------------------------------

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "This course needs Python 3.11, 3.12 or 3.13 with the venv module; none was found."; \
	  echo "Install one (on Debian and Ubuntu also python3-venv), or name it: make lab PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.lab: requirements.txt constraints.txt pyproject.toml | $(VENV)/.made
	$(call INSTALL,-r requirements.txt)
	@touch $@

$(VENV)/.test: requirements.txt constraints.txt pyproject.toml | $(VENV)/.made
	$(call INSTALL,-r requirements.txt -e '.[test]')
	@touch $(VENV)/.lab $@

$(VENV)/.grading: $(VENV)/.lab
	$(call INSTALL,-e '.[grading]')
	@touch $@

$(VENV)/.site: $(VENV)/.lab
	$(call INSTALL,-e '.[site]')
	@touch $@

# ---- a reader ------------------------------------------------------------------------------------------------------------------

site: $(VENV)/.site  ## build the website in build/site/html, to be opened there or served; offline once installed
	$(BIN)/python -m website.build

# ---- a student ---------------------------------------------------------------------------------------------------------------

lab: $(VENV)/.lab  ## set everything up and open JupyterLab at the first notebook
	@$(BIN)/python -m utils.runtime || true
	$(BIN)/jupyter lab $(SERVER) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

runtime: $(VENV)/.lab  ## say what works on this machine, and what to do about what does not
	$(BIN)/python -m utils.runtime

check-lab: $(VENV)/.lab  ## the points of your answers, as the class grader would give them: LAB=lab3
	@test -n "$(LAB)" || { echo "Say which lab: make check-lab LAB=lab3"; exit 2; }
	$(BIN)/python -m grading.check_lab $(LAB)

# ---- an instructor -----------------------------------------------------------------------------------------------------------

check: $(VENV)/.test  ## lint, format and unit tests, in under two minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	MLF_DEVICE=cpu $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not thorough"

# Notebooks side by side compute on one thread each: threads that wait for each other on busy cores spin for minutes.
test: $(VENV)/.test  ## everything that CI runs: lint, tests, labs, claims, every notebook under nbval
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m grading.release --check
	$(BIN)/python -m utils.notebooks check $(NOTEBOOKS)
	$(BIN)/python -m utils.claims --check
	MLF_DEVICE=cpu $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not thorough"
	@if $(BIN)/python -c 'from utils import runtime; raise SystemExit(runtime.INTERPRET)'; then \
	  echo "This machine has a GPU: the tests once more, with kernels compiled for it." && \
	  $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not thorough"; fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope --no-loadscope-reorder --nbval --nbval-current-env --nbval-cell-timeout=120 $(NOTEBOOKS)

test-compat: | $(VENV)/.made  ## the interpreter and the profiler on another Triton, in an environment of its own: TRITON=3.9.0
	test -d .venv-triton-$(TRITON) || $(PYTHON) -m venv .venv-triton-$(TRITON)
	grep -v '^triton==' constraints.txt > .venv-triton-$(TRITON)/constraints.txt
	.venv-triton-$(TRITON)/bin/python -m pip install -q $(PIP_INDEX) -c .venv-triton-$(TRITON)/constraints.txt -r requirements.txt -e '.[test]'
	.venv-triton-$(TRITON)/bin/python -m pip install -q --no-deps triton==$(TRITON)
	.venv-triton-$(TRITON)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m compat

labs: $(VENV)/.lab  ## generate labs/ from solutions/
	$(BIN)/python -m grading.release

grade: $(VENV)/.grading  ## grade a class: LAB=lab2 SUBMISSIONS=folder [OUT=grades] [JOBS=2] [GRADE_ARGS="--students ada"]
	@test -n "$(LAB)" -a -n "$(SUBMISSIONS)" || { echo "Say what to grade: make grade LAB=lab2 SUBMISSIONS=folder"; exit 2; }
	$(BIN)/python -m grading.grade $(LAB) --submissions "$(SUBMISSIONS)" --out "$(OUT)" --jobs $(JOBS) $(GRADE_ARGS)

# As many at a time as `make grade` grades: what it does for a class is what is held here.
test-grading: $(VENV)/.test  ## more seeds and wrong answers than `make test` tries; then a class of 120 submissions per lab, most of them hostile [LABS="lab1 lab2"]
	MLF_DEVICE=cpu $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m thorough
	MLF_DEVICE=cpu $(BIN)/python -m tests.grading_cohort $(LABS) --jobs $(JOBS)

mutate: $(VENV)/.test  ## every solution of a lab with one small mistake, against its checks: LAB=lab3 [MUTATE_ARGS="--only 3.1"]
	@test -n "$(LAB)" || { echo "Say which lab: make mutate LAB=lab3"; exit 2; }
	MLF_DEVICE=cpu OMP_NUM_THREADS=1 $(BIN)/python -m grading.mutation $(LAB) --jobs $(JOBS) $(MUTATE_ARGS)

claims: $(VENV)/.lab  ## write the ledger of claims from the executed notebooks
	$(BIN)/python -m utils.claims

notebooks: $(VENV)/.lab  ## stamp the setup cell and re-execute the notebooks in place: NOTEBOOKS="notebooks/02_roofline.ipynb"
	$(BIN)/python -m utils.notebooks stamp $(NOTEBOOKS)
	$(BIN)/python -m utils.notebooks execute $(NOTEBOOKS)
	$(BIN)/python -m utils.claims

measure: $(VENV)/.lab  ## on a GPU: run every benchmark and renew utils/records/
	$(BIN)/python -m benchmarks.all

format: $(VENV)/.test  ## format the Python files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environments and caches that these targets made
	rm -rf $(VENV) .venv-triton-* .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
