# Making LLMs Fast. `make lab` works as the first command on a fresh machine with Python >= 3.11 and make; so does `make test`,
# which is in instructor.mk with all that the students' copy of the course does not have.

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
# The whole course is served. The first notebook is open, or that of a lab, with its first module beside it.
OPENED  = $(if $(LAB),$(wildcard labs/$(LAB)_*/$(LAB)_*.ipynb),notebooks/01_gpu_model.ipynb)
SERVER  = --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/$(OPENED) \
          --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate
.DEFAULT_GOAL := help
.PHONY: help lab runtime check-lab submit clean

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
	rm -rf $(VENV) .venv-triton-* .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

-include instructor.mk
