# Making LLMs Fast. `make lab` works as the first command on a fresh machine with make and Python 3.11 to 3.14, or uv; so does
# `make test`, which is in instructor.mk with all that the students' copy of the course does not have.

VENV   ?= .venv
BIN    := $(VENV)/bin
PIP     = PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check
# The first Python that fits makes the environment: PYTHON=name, or one of these, or one that uv has or fetches.
PYTHONS = $(or $(PYTHON),python3.14 python3.13 python3.12 python3.11 python3)
FITS    = import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
FIND_PYTHON = for p in $(PYTHONS); do "$$p" -c '$(FITS)' 2>/dev/null && command -v "$$p" && exit; done; \
          test -z "$(PYTHON)" && command -v uv >/dev/null && export UV_PYTHON_PREFERENCE=only-managed && \
          { uv python find '>=3.11,<3.15' 2>/dev/null || { uv python install 3.13 >&2 && uv python find 3.13; }; }
# CPU=1 takes PyTorch's build without CUDA on a Linux machine that has no NVIDIA GPU: a tenth of PyTorch's download.
SIZE      = $(if $(CPU),0.5 GB,3 GB (with CPU=1, for a machine without an NVIDIA GPU, 0.5 GB))
PIP_INDEX = $(if $(CPU),--extra-index-url https://download.pytorch.org/whl/cpu)
PINS      = constraints.txt
# pip 25.1 and later show how far an installation is. pip would compile what it installs on one core, which takes as long as the
# rest; compileall takes all cores. (Some packages hold files that no Python compiles; that is no failure. Their tests and models
# are left to whoever imports them.) The stamp of a target says what was there when its installation was done.
INSTALL = @$(PIP) install -q --dry-run --no-deps --ignore-installed --retries 0 --timeout 10 tqdm 2>/dev/null || { \
            echo "Packages must be fetched and no package index answers: connect this machine to the network, then run make again."; exit 1; }; \
          $(PIP) install -q 'pip>=25.1' 2>/dev/null; $(PIP) install --no-compile $(PIP_INDEX) -c $(PINS) $(1) || { \
            echo "The installation has failed; pip says why above. Run make again: what was fetched is kept."; exit 1; }; \
          echo "Compiling the packages ..."; \
          PYTHONWARNINGS=ignore $(BIN)/python -m compileall -q -j 0 -x '/(tests?|models|openai/types|_inductor)/' $(VENV)/lib >/dev/null || true; \
          ls $(VENV)/lib/python3*/site-packages | grep '[.]dist-info$$' > $@
# The whole course is served. The first notebook is open, or that of a lab, with its first module beside it.
OPENED  = $(if $(LAB),$(wildcard labs/$(LAB)_*/$(LAB)_*.ipynb),notebooks/01_gpu_model.ipynb)
SERVER  = --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/$(OPENED) \
          --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate
.DEFAULT_GOAL := help
.PHONY: help lab runtime check-lab submit clean FORCE

help:  ## show this list
	@echo "Making LLMs Fast: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- the environment: made once, renewed when a requirement changes, repaired when it is broken --------------------------------

# Every command looks at the environment first. This file is renewed when something must be installed into it.
$(VENV)/.made: FORCE
	@$(BIN)/python -m utils.installation 2>/dev/null; case $$? in 0) test -e $@ || touch $@;; 3) touch $@;; *) \
	  python=$$($(FIND_PYTHON)) || { \
	    echo "This course needs Python 3.11 to 3.14 with the venv module. $(if $(PYTHON),$(PYTHON) is not one.,None was found.)"; \
	    echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or uv, or name it: make lab PYTHON=/path/to/python3.12"; \
	    exit 1; }; \
	  test ! -e $(BIN) || echo "The environment in $(VENV) does not work, or was left half made. It is made anew."; \
	  echo "Making an environment in $(VENV) with $$python. Its packages are fetched once: about $(SIZE)."; \
	  "$$python" -m venv --clear $(VENV) && touch $@;; esac

FORCE:

$(VENV)/.lab: requirements.txt constraints.txt pyproject.toml $(VENV)/.made
	$(call INSTALL,-r requirements.txt)

# ---- a student ---------------------------------------------------------------------------------------------------------------

lab: $(VENV)/.lab  ## set everything up and open JupyterLab at the first notebook, or at a lab beside its modules: [LAB=lab3]
	@test -n "$(OPENED)" || { echo "There is no lab $(LAB)."; exit 2; }
	@$(BIN)/python -m utils.runtime || true
	@$(BIN)/python -m utils.jupyterlab
	$(BIN)/jupyter lab $(SERVER) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

runtime: $(VENV)/.lab  ## say what works on this machine, and what to do about what does not
	$(BIN)/python -m utils.runtime

check-lab: $(VENV)/.lab  ## the points of your answers, as the class grader would give them: LAB=lab3
	@test -n "$(LAB)" || { echo "Say which lab: make check-lab LAB=lab3"; exit 2; }
	$(BIN)/python -m grading.check_lab $(LAB)

submit: $(VENV)/.lab  ## pack what you hand in of a lab, and say what is in it: LAB=lab3
	@test -n "$(LAB)" || { echo "Say which lab: make submit LAB=lab3"; exit 2; }
	$(BIN)/python -m grading.submit $(LAB)

clean:  ## remove the environments and caches that these targets made
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

-include instructor.mk
