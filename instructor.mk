# What the students' copy of the course does not have: testing, grading, measuring, the website. The Makefile includes it.

JOBS   ?= 2
# Tests wait for browsers, compilers and other processes: on two cores three testers end half a minute before two.
TESTERS ?= 3
# The files of tests that hold a time: only they are collected for these, which run alone.
TIMED   = $(shell grep -l 'mark[.]timed' tests/test_*.py)
ALL     = $(wildcard notebooks/*.ipynb solutions/*/*.ipynb)
# Those that take longest come first, so that the last ones end together.
LONG    = $(foreach n,10 11 19 18 17 08 14 09 04 13 12 15,$(filter notebooks/$(n)_%,$(ALL)))
NOTEBOOKS ?= $(LONG) $(filter-out $(LONG),$(ALL))
TORCH  ?= 2.15.0
TRITON ?= 3.9.0
TESTS  ?= not thorough and not timed
# What Python compiles is kept, also where the environment says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =
# The website that the tests have built: once for those side by side and those that run alone.
TESTED  = MLF_SITE=$(CURDIR)/build/tested-site

.PHONY: site check test test-thorough test-compat labs release grade test-grading mutate claims notebooks measure format

$(VENV)/.test: requirements.txt constraints.txt pyproject.toml $(VENV)/.made
	$(call INSTALL,-r requirements.txt -e '.[test]')
	@cp $@ $(VENV)/.lab

$(VENV)/.grading: $(VENV)/.lab
	$(call INSTALL,-e '.[grading]')

$(VENV)/.cluster: $(VENV)/.grading
	$(call INSTALL,-e '.[cluster]')

$(VENV)/.site: $(VENV)/.lab
	$(call INSTALL,-e '.[site]')

# ---- a reader ------------------------------------------------------------------------------------------------------------------

site: $(VENV)/.site  ## build the website in build/site/html, to be opened there or served; offline once installed
	$(BIN)/python -m website.build

# ---- an instructor -----------------------------------------------------------------------------------------------------------

check: $(VENV)/.test  ## lint, format and unit tests, in a minute and a half
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	MLF_DEVICE=cpu $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not thorough"

# Tests and notebooks side by side compute on one thread each: threads that wait for each other on busy cores spin for minutes.
test: $(VENV)/.test  ## everything that CI runs: lint, tests, labs, claims, every notebook under nbval
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m grading.release --check
	$(BIN)/python -m utils.notebooks check $(NOTEBOOKS)
	$(BIN)/python -m utils.claims --check
	mkdir -p build && rm -rf build/tested-site
	$(TESTED) OMP_NUM_THREADS=1 MLF_DEVICE=cpu $(BIN)/python -m pytest -q -n $(TESTERS) --dist loadfile --no-loadscope-reorder -m "not thorough and not timed"
	$(TESTED) MLF_DEVICE=cpu $(BIN)/python -m pytest -q -m "timed and not thorough" $(TIMED)
	@if $(BIN)/python -c 'from utils import runtime; raise SystemExit(runtime.INTERPRET)'; then \
	  echo "This machine has a GPU: the tests once more, with kernels compiled for it." && \
	  $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not thorough and not timed"; fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TESTERS) --dist loadscope --no-loadscope-reorder --nbval --nbval-current-env --nbval-cell-timeout=300 $(NOTEBOOKS)

test-thorough: $(VENV)/.test  ## what `make test` tries in part: all seeds, wrong answers, architectures, and every page in a browser
	mkdir -p build && rm -rf build/tested-site
	$(TESTED) OMP_NUM_THREADS=1 MLF_DEVICE=cpu $(BIN)/python -m pytest -q -n $(TESTERS) --dist loadfile --no-loadscope-reorder -m "thorough and not timed"
	$(TESTED) MLF_DEVICE=cpu $(BIN)/python -m pytest -q -m "timed and thorough" $(TIMED)

# These versions instead of the pins; setuptools is left to PyTorch, which bounds it.
test-compat: COMPAT = .venv-$(notdir $(or $(PYTHON),python3))-torch-$(TORCH)-triton-$(TRITON)
test-compat:  ## the unit tests and every notebook on other versions, in an environment of their own; the result goes into tests/COMPATIBILITY.md [PYTHON=python3.12] [TORCH=2.15.0 TRITON=3.9.0] [TESTS="not slow and not thorough"]
	mkdir -p build
	sed 's/^torch==.*/torch==$(TORCH)/; s/^triton==.*/triton==$(TRITON)/; /^setuptools==/d' constraints.txt > build/pins-$(TORCH)-$(TRITON).txt
	$(MAKE) VENV=$(COMPAT) PINS=build/pins-$(TORCH)-$(TRITON).txt $(COMPAT)/.test
	rm -f $(COMPAT)/*.xml
	-OMP_NUM_THREADS=1 MLF_DEVICE=cpu $(COMPAT)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(TESTS)" --junitxml=$(COMPAT)/tests.xml
	-OMP_NUM_THREADS=1 MLF_DEVICE=cpu $(COMPAT)/bin/python -m pytest -q -n $(JOBS) --dist loadscope --no-loadscope-reorder --nbval --nbval-current-env --nbval-cell-timeout=300 --junitxml=$(COMPAT)/cells.xml $(NOTEBOOKS)
	$(COMPAT)/bin/python -m tests.compatibility "$(TESTS)" $(COMPAT)/tests.xml $(COMPAT)/cells.xml

labs: $(VENV)/.lab  ## generate labs/ from solutions/
	$(BIN)/python -m grading.release

release: OUT ?= build/release
release: $(VENV)/.lab  ## write the students' copy of the course, a folder and a zip: [OUT=build/release]
	$(BIN)/python -m grading.student_copy "$(OUT)"

grade: OUT ?= grades
grade: $(VENV)/.grading $(if $(CLUSTER),$(VENV)/.cluster)  ## grade a class: LAB=lab2 SUBMISSIONS=folder [OUT=grades] [JOBS=2] [CLUSTER=address] [GRADE_ARGS="--students ada"]
	@test -n "$(LAB)" -a -n "$(SUBMISSIONS)" || { echo "Say what to grade: make grade LAB=lab2 SUBMISSIONS=folder"; exit 2; }
	$(BIN)/python -m grading.grade $(LAB) --submissions "$(SUBMISSIONS)" --out "$(OUT)" --jobs $(JOBS) $(if $(CLUSTER),--cluster "$(CLUSTER)") $(GRADE_ARGS)

# As many at a time as `make grade` grades: what it does for a class is what is held here.
test-grading: $(VENV)/.test  ## grade a class of 10 to 140 submissions per lab, right, wrong and hostile, and hold each grade against what it must be [LABS="lab1 lab2"]
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
