# dragoman: `make help` lists the targets. The only prior step is Python 3.11 or later, with its venv module.
#
# PYTHON=python3.12     which interpreter to build .venv with (else the first of the usual names that is new enough)
# PIP_ARGS='...'        passed to `pip install`; without a GPU, this fetches a much smaller PyTorch:
#                       PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'

PYTHON ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
DATA := data/tatoeba-en-zh
DEMO := runs/demo
DRAGOMAN := .venv/bin/dragoman

.PHONY: help demo test test-slow test-long lint format venv venv-dev
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a small English-Chinese Transformer on this machine's CPU, score it and translate with it"
	@echo "make test       every test that is not marked slow"
	@echo "make test-slow  the tests that are, but for the longest (make test-long)"
	@echo "make lint       formatting, lint and types; make format mends the first two where it can"
	@echo "make venv       only the environment in .venv (venv-dev: with what the tests need)"

# install EXTRAS STAMP: make .venv where there is none, and install the project in it unless the stamp says that this
# very pyproject.toml was installed. pip does not ask an index for what is there already, so this works offline too.
define install
	@key=$$(cksum < pyproject.toml); \
	for stamp in $(2); do if [ "$$(cat .venv/$$stamp 2>/dev/null)" = "$$key" ]; then exit 0; fi; done; \
	if [ ! -x .venv/bin/python ]; then \
		for python in $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11); do \
			if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then echo "No Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
		echo "== Making a virtual environment in .venv with $$($$found --version)"; \
		$$found -m venv .venv || exit 1; \
	fi; \
	echo "== Installing dragoman$(1) in .venv (the first time this fetches PyTorch, and takes a few minutes)"; \
	.venv/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) 'setuptools>=77' || exit 1; \
	.venv/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) --no-build-isolation -e '.$(1)' || exit 1; \
	echo "$$key" > .venv/$(firstword $(2))
endef

venv:
	$(call install,,stamp-core stamp-dev)

venv-dev:
	$(call install,[dev],stamp-dev)

demo: venv
	@echo "== 1/5 The corpus: English-Chinese sentences of the Tatoeba project, into $(DATA)"
	$(DRAGOMAN) data get tatoeba-en-zh --out $(DATA)
	@echo "== 2/5 Training as recipes/demo.toml says, into $(DEMO); Ctrl-C stops it, and make demo goes on from there"
	$(DRAGOMAN) train recipes/demo.toml --out $(DEMO) --resume
	@echo "== 3/5 Scores on test sentences that training has not seen"
	$(DRAGOMAN) evaluate $(DEMO) --tsv $(DATA)/test.tsv
	@echo "== 4/5 Some of those sentences: source, reference, translation"
	@head -n 12 $(DATA)/test.tsv > $(DEMO)/sample.tsv
	@cut -f 1 $(DEMO)/sample.tsv | $(DRAGOMAN) translate $(DEMO) --quiet > $(DEMO)/sample.txt
	@paste $(DEMO)/sample.tsv $(DEMO)/sample.txt | awk -F '\t' '{ print $$1; print "   " $$2; print "-> " $$3 }'
	@echo "== 5/5 A look inside, for one of them"
	$(DRAGOMAN) inspect $(DEMO) --text "$$(head -n 1 $(DEMO)/sample.tsv | cut -f 1)" --out $(DEMO)/report.html --force
	@echo
	@echo "The model:      $(DEMO)"
	@echo "The report:     $(DEMO)/report.html (curves, positions, attention: open it in a browser)"
	@echo "Your sentences: echo 'Where is the station?' | $(DRAGOMAN) translate $(DEMO)"
	@echo "Once more:      rm -r $(DEMO) && make demo"

# Hugging Face's libraries are told not to look for a network that the tests do not need.
test: venv-dev
	HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: venv-dev
	HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -m "slow and not long" $(PYTEST_ARGS)

test-long: venv-dev
	HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -m long $(PYTEST_ARGS)

lint: venv-dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: venv-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
