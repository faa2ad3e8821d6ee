# make venv | demo [MODEL=DIR|HUB-ID|FILE.gguf] | test [ARGS="-k word"] | lint | docs | protos | publish-protos | lock

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PROTOS := $(wildcard protos/paged/v1/*.proto)
STUBS := paged/v1/inference_pb2.py

# An empty MODEL takes the small one, which is prepared once.
MODEL ?=
ARGS ?=

.PHONY: venv demo test test-plain test-services lint docs protos publish-protos lock

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

# Tests of these call no services and measure no time: two processes run them; others have the machine to themselves.
PLAIN := tests/kernels $(addprefix tests/model/test_,families.py fused.py parallel.py real_model.py) tests/core tests/text

test: venv
ifeq ($(ARGS),)
	$(MAKE) test-plain
	$(MAKE) test-services
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-plain: venv
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PLAIN)

test-services: venv
	$(BIN)/python -m pytest $(PLAIN:%=--ignore=%)

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

# Exact versions of all that tests install. Local versions (2.13.0+cpu) are left out: each platform has its own.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet -e '.[dev]' 'torch==2.13.0'
	.venv-lock/bin/python -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools \
		| sed 's/+[a-z0-9.]*$$//' > requirements.lock
	rm -rf .venv-lock
