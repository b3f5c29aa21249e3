# `make quickstart` and `make test` are all that a fresh machine needs. Set-up is one virtual environment, made once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
PY     := $(VENV)/bin/python
EXTRAS := .[operator,buffer,rollout,trainer,local]
DEV    := .[client,dev,docs,s3,gcs,azure,tracing,wandb]
# One stage of a set-up: $(call stage,ENVIRONMENT,TEXT,COMMAND) and $(call install,ENVIRONMENT,TEXT,PACKAGES).
stage   = tools/stage.sh $(1)/setup.log "$(2)" $(3)
install = $(call stage,$(1),$(2),$(1)/bin/python -m pip --disable-pip-version-check install $(3))
# The pins of what an environment has besides our extras: $(call pins,NAME ...).
pins    = $(foreach name,$(1),--requirement requirements/$(name).txt)
BUILD    ?= docker build
REGISTRY ?= ghcr.io/sluice-dev
TAG      ?= 0.1.0

# The rooms whose tests run alone: the integration tests first, because they take longest.
ROOMS := buffer cli docs engines migrate monitoring operator rendezvous rewards rollout sluice trainer
tests_buffer     := tests/integration/buffer tests/unit/buffer
tests_cli        := tests/integration/run tests/integration/faults tests/unit/cli tests/unit/client
tests_docs       := tests/unit/docs tests/unit/examples tests/unit/benchmarks
tests_engines    := tests/unit/engines
tests_migrate    := tests/unit/migrate
tests_monitoring := tests/integration/monitoring tests/unit/observability
tests_operator   := tests/integration/local_cluster tests/unit/operator tests/unit/chart
tests_rendezvous := tests/integration/rendezvous tests/unit/rendezvous
tests_rewards    := tests/integration/rewards tests/unit/rewards
tests_rollout    := tests/integration/rollout tests/unit/rollout tests/unit/gateway tests/unit/environments
tests_sluice     := tests/integration/stores tests/unit/api tests/unit/data tests/unit/images tests/unit/stores tests/unit/telemetry tests/unit/trackers tests/unit/weight_store tests/unit/wire $(wildcard tests/unit/test_*.py)
tests_trainer    := tests/integration/weights tests/integration/trainer tests/integration/models tests/unit/trainer

.PHONY: help quickstart agents azurite trl verl vllm test test-all test-vllm test-long test-chaos test-cluster test-node test-learning test-pythons pythons $(addprefix test-,$(ROOMS)) kind-up kind-down test-kind lint images protos crds reference kubernetes-fields observability house models dashboards-up dashboards-down check-generated docs clean

help:
	@echo "make quickstart      a real RL run on this machine's CPU, with a report at the end (4 min)"
	@echo "                     (ENGINE=vllm: on vLLM, which make vllm sets up in an environment of its own)"
	@echo "make test            everything pure, and the core with real engines (5 min)"
	@echo "make test-ROOM       unit and integration tests of one of: $(ROOMS)"
	@echo "make test-all        all tests that need no GPU and no cluster, but those of make test-long (20 min)"
	@echo "make test-long       runs of minutes each: one fault of each kind, whole runs (12 min)"
	@echo "make test-vllm       those that an engine has to pass, on vLLM (5 min)"
	@echo "make test-chaos      200 random faults over real runs (FAULTS=n; SLUICE_TEST_SEED repeats them; 90 min)"
	@echo "make test-cluster    the operator's tests, on a real Kubernetes API server (7 min)"
	@echo "make test-node       the quickstart in real pods, on a Kubernetes node of this machine (root; 10 min)"
	@echo "make test-learning   examples learn: five estimators, agents, sft, distillation; and a figure (45 min)"
	@echo "make test-pythons    the quickstart with Python 3.12 and 3.13, where they are installed (10 min)"
	@echo "make kind-up         a kind cluster with sluice on it (docker, kind, kubectl, helm); make kind-down deletes it"
	@echo "make test-kind       cluster tests, chart's own test and quickstart on that cluster"
	@echo "make lint            ruff, mypy, import rules, Dockerfile, workflows, generated files (2 min)"
	@echo "make docs            these pages as a site, in site/; fails where a link or an anchor leads nowhere (1 min)"
	@echo "make images          the container images (docker/Dockerfile)"
	@echo "make protos crds reference kubernetes-fields observability   regenerate what is generated"
	@echo "make models          the table of model support, by its tests (long; with vLLM, if make vllm has set it up)"
	@echo "make dashboards-up   Prometheus and Grafana over a run on this machine (docker; RUN=runs/quickstart); dashboards-down ends them"
	@echo "make clean           remove the environment, caches and the quickstart's run"

# torch comes first: its CPU build must be there before anything can ask for a CUDA build. SGLang and megatron-core
# come without their requirements: SGLang's pull in the CUDA stack, and megatron-core's metadata asks for a newer Python
# than its code needs. pip complains of that for every later package; what it prints is in setup.log.
$(VENV)/.ready: pyproject.toml migrate/pyproject.toml requirements/torch-cpu.txt requirements/sglang.txt requirements/megatron.txt
	@echo "setting up $(VENV), once; mostly download (all output: $(VENV)/setup.log)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(call install,$(VENV),1/4 torch,$(call pins,torch-cpu))
	@$(call install,$(VENV),2/4 sluice and what it needs,-e '$(EXTRAS)' -e migrate)
	@$(call install,$(VENV),3/4 SGLang and Megatron-core,--no-deps --ignore-requires-python $(call pins,sglang megatron))
	@$(call stage,$(VENV),4/4 SGLang for the CPU,$(PY) -m sluice.engines.sglang.cpu)
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@$(call install,$(VENV),tools of tests and docs,-e '$(DEV)')
	@touch $@

# vLLM needs other releases of what we need, so it has an environment of its own, which engines are started in. On a
# CPU it does without torchvision, torchaudio and torchcodec, whose wheels are CUDA builds that do not load beside a
# CPU's torch; transformers then finds none, and asks for none.
.venv-vllm/.ready: requirements/torch-cpu.txt requirements/vllm.txt
	@echo "setting up .venv-vllm, once (all output: .venv-vllm/setup.log)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@$(call install,.venv-vllm,torch,$(call pins,torch-cpu))
	@$(call install,.venv-vllm,vLLM,$(call pins,vllm))
	@$(call stage,.venv-vllm,without CUDA builds,.venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec)
	@touch $@

vllm: .venv-vllm/.ready

# Programs that tests train as they are want another `openai` than SGLang, and two releases of mcp; GEM another
# reasoning-gym than ours.
.venv-agents/.ready .venv-gym/.ready .venv-trackers/.ready .venv-verifiers/.ready: .venv-%/.ready: requirements/%.txt
	@echo "setting up .venv-$*, once (all output: .venv-$*/setup.log)"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@$(call install,.venv-$*,programs of the agents' tests: $*,$(call pins,$*))
	@touch $@

# A server of OpenEnv's environments, without what its command line and its web page need.
.venv-openenv/.ready: requirements/openenv.txt requirements/openenv-core.txt
	@echo "setting up .venv-openenv, once (all output: .venv-openenv/setup.log)"
	@test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	@$(call install,.venv-openenv,servers of the agents' tests,$(call pins,openenv))
	@$(call install,.venv-openenv,OpenEnv,--no-deps $(call pins,openenv-core))
	@touch $@

agents: .venv-agents/.ready .venv-gym/.ready .venv-trackers/.ready .venv-verifiers/.ready .venv-openenv/.ready

# A server of Azure's blob storage, for the tests; it needs npm.
.venv-azurite/.ready:
	@echo "setting up .venv-azurite, once (all output: .venv-azurite/setup.log)"
	@mkdir -p .venv-azurite
	@$(call stage,.venv-azurite,Azurite,npm install --no-audit --no-fund --prefix .venv-azurite azurite@3.37.0)
	@touch $@

azurite: .venv-azurite/.ready

# What benchmarks/peers.py compares with: another release of transformers than ours.
.venv-trl/.ready: requirements/torch-cpu.txt requirements/trl.txt
	@echo "setting up .venv-trl, once (all output: .venv-trl/setup.log)"
	@test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	@$(call install,.venv-trl,torch,$(call pins,torch-cpu))
	@$(call install,.venv-trl,TRL,$(call pins,trl))
	@touch $@

trl: .venv-trl/.ready

# verl likewise, with an SGLang whose ServerArgs it can read, and what that needs on a CPU. transformers is SGLang's;
# verl's metadata asks for an older one.
.venv-verl/.ready: requirements/torch-cpu.txt requirements/verl.txt requirements/verl-sglang.txt
	@echo "setting up .venv-verl, once (all output: .venv-verl/setup.log)"
	@test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	@$(call install,.venv-verl,torch,$(call pins,torch-cpu))
	@$(call install,.venv-verl,verl,$(call pins,verl))
	@$(call install,.venv-verl,SGLang,--no-deps $(call pins,verl-sglang))
	@.venv-verl/bin/python sluice/engines/sglang/cpu/__main__.py
	@touch $@

verl: .venv-verl/.ready

quickstart: $(VENV)/.ready $(if $(filter vllm,$(ENGINE)),.venv-vllm/.ready)
	@$(PY) examples/quickstart/make_data.py examples/quickstart
	@$(VENV)/bin/sluice run examples/quickstart/job.yaml --run-dir runs/quickstart $(if $(ENGINE),--set rollout.engine=$(ENGINE)) $(ARGS)

# Ten steps of the quickstart with each other Python that we support and that is on this machine. There torch is the
# CUDA build, for want of a CPU wheel, and runs on the CPU all the same.
each-python = for version in 3.12 3.13; do \
	  python=$$(PYENV_VERSION=$$version python$$version -c 'import sys; print(sys.executable)' 2>/dev/null) || { echo "no Python $$version on this machine: left out"; continue; }; \
	  $(MAKE) --no-print-directory VENV=.venv-python-$$version PYTHON=$$python $(1) || exit 1; \
	done

test-pythons:
	@$(call each-python,quickstart ARGS="--run-dir runs/python-$$version --fresh --set trainer.steps=10")

# Its set-up, which is most of its time, and download: .ci/run has it done beside other tests.
pythons:
	@$(call each-python,.venv-python-$$version/.ready)

# Three files at a time on two cores: one waits for an engine while others compute. `ARGS=-n0` for one after another.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 --dist loadfile -m "not vllm and not long"
# Real servers on a busy machine: a test that fails is run once more, and the summary names it.
AGAIN := --reruns 1 -raR
# With real engines: a run that is continued, one whose processes are killed, an update of weights, an agent's episode.
CORE := tests/integration/run/test_run.py::test_a_run_trains_and_leaves_its_story \
  tests/integration/run/test_kill.py \
  tests/integration/weights/test_sender.py::test_new_weights_arrive_and_the_engine_may_work \
  tests/integration/rollout/test_gateway.py::test_three_turns_with_two_tools_are_the_tokens_that_the_engine_sampled

# Everything pure, and the core with real engines; what needs another environment is left out.
test: $(VENV)/.dev
	$(PYTEST) $(CORE) tests/unit $(ARGS)

test-all: $(VENV)/.dev agents
	$(PYTEST) $(AGAIN) --no-loadscope-reorder --durations=30 tests/chaos tests/integration tests/unit $(ARGS)

# A room's tests, and the ten slowest of them. Tests that need another environment are skipped unless `make agents` made it.
$(addprefix test-,$(ROOMS)): test-%: $(VENV)/.dev
	$(PYTEST) --no-loadscope-reorder --durations=10 $(tests_$*) $(ARGS)

# Runs of minutes each: roles that freeze, a clock that jumps, gangs of which a pod dies; whole runs of what smaller
# tests show part by part; and combinations of which test-all has a part (tests/cases.py).
test-long: $(VENV)/.dev agents azurite .venv-trl/.ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --durations=15 -m long tests/chaos tests/integration $(ARGS)

# The claims that every engine has to keep, with the real server.
test-vllm: $(VENV)/.dev .venv-vllm/.ready
	SLUICE_TESTS_MUST_RUN=1 OMP_NUM_THREADS=1 $(PY) -m pytest tests/integration tests/unit -m vllm --durations=15 $(ARGS)

# The short one, tests/chaos/test_chaos_short.py, is part of `make test-long`.
test-chaos: $(VENV)/.dev
	FAULTS=$(or $(FAULTS),200) OMP_NUM_THREADS=1 $(PY) -m tests.chaos

# Needs an API server: KUBECONFIG, KUBEBUILDER_ASSETS or kind (tests/cluster/control_plane.py); and helm and kubectl.
# Beside one that drops CEL rules it starts another one, or takes that of CEL_KUBECONFIG. Four files at a time where each
# process starts a server of its own.
test-cluster: $(VENV)/.dev
	$(PY) -m pytest $(if $(KUBECONFIG),,-n 4 --dist loadfile) $(AGAIN) --durations=15 tests/cluster -m cluster $(ARGS)

# Needs root and a node: that of KUBECONFIG, or one that tests/node/node.py finds and starts.
test-node: $(VENV)/.dev
	$(PY) -m pytest tests/node -m node $(ARGS)

# Need docker, kind, kubectl and helm. `make kind-up IMAGES=built` takes images that are there.
kind-up:
	IMAGES=$(IMAGES) REGISTRY=$(REGISTRY) TAG=$(TAG) tests/kind/kind.sh up

kind-down:
	tests/kind/kind.sh down

test-kind: $(VENV)/.dev
	IMAGES=$(IMAGES) REGISTRY=$(REGISTRY) TAG=$(TAG) tests/kind/kind.sh test

# Each run keeps its directory, for the figure and for `sluice report`.
test-learning: $(VENV)/.dev agents
	SLUICE_LEARNING_DIR=runs/learning OMP_NUM_THREADS=1 $(PY) -m pytest tests/learning $(ARGS)
	$(PY) -m tests.learning.figure runs/learning docs/results/learning.png

lint: $(VENV)/.dev check-generated
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/hadolint docker/Dockerfile
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/zizmor --offline --quiet --min-severity medium .github

protos: $(VENV)/.dev
	rm -rf sluice/wire/v1 && mkdir -p sluice/wire/v1
	$(PY) -m grpc_tools.protoc -I protos --python_out=sluice/wire --pyi_out=sluice/wire --grpc_python_out=sluice/wire protos/sluice/v1/*.proto
	mv sluice/wire/sluice/v1/* sluice/wire/v1/ && rm -r sluice/wire/sluice
	sed -i 's/^from sluice\.v1 import/from sluice.wire.v1 import/' sluice/wire/v1/*.py sluice/wire/v1/*.pyi
	echo '"""Generated from protos/sluice/v1 by make protos."""' > sluice/wire/v1/__init__.py

# Needs a builder: docker, or `make images BUILD="podman build"`.
images:
	for image in operator buffer rollout trainer cpu; do \
	  $(BUILD) -f docker/Dockerfile --target $$image -t $(REGISTRY)/sluice-$$image:$(TAG) $(ARGS) . || exit 1; \
	done

crds: $(VENV)/.dev
	$(VENV)/bin/sluice crd rljob > crds/sluice.dev_rljobs.yaml
	$(VENV)/bin/sluice crd rlenginepool > crds/sluice.dev_rlenginepools.yaml
	cp crds/sluice.dev_rljobs.yaml charts/sluice/files/rljobs.sluice.dev.yaml
	cp crds/sluice.dev_rlenginepools.yaml charts/sluice/files/rlenginepools.sluice.dev.yaml

reference: $(VENV)/.dev
	mkdir -p docs/reference
	$(VENV)/bin/sluice reference rljob > docs/reference/rljob.md
	$(VENV)/bin/sluice reference rlenginepool > docs/reference/rlenginepool.md
	$(VENV)/bin/sluice reference cli > docs/reference/cli.md

# What laptops check templates with: the fields of Kubernetes' objects, as the operator's client has them.
kubernetes-fields: $(VENV)/.dev
	$(PY) -m sluice_operator.cluster.kube.schema > sluice/api/schema/kubernetes_fields.json

# The chart's dashboards, recording rules and alerts.
observability: $(VENV)/.dev
	$(PY) -m observability charts/sluice/files

# What tests show of model families, in sluice/model_support.json and docs/models.md.
models: $(VENV)/.dev
	SLUICE_UPDATE_GOLDEN=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n0 -m support tests/integration
	$(PY) tools/model_table.py docs/models.md

# Figures of the code, in docs/architecture.md.
house: $(VENV)/.dev
	$(PY) tools/house.py --write docs/architecture.md

# Need docker. Both listen on the loopback alone: Grafana on 3000, Prometheus on 9090.
dashboards-up:
	RUN=$(abspath $(or $(RUN),runs/quickstart)) docker compose -f observability/compose/compose.yaml up --detach
	@echo "Grafana: http://127.0.0.1:3000/dashboards"

dashboards-down:
	RUN=$(abspath $(or $(RUN),runs/quickstart)) docker compose -f observability/compose/compose.yaml down --volumes

# Strict: a page without a place in mkdocs.yml, and a link or anchor that leads nowhere, fail.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# Generated files must be what their sources give.
check-generated: protos crds reference kubernetes-fields observability
	git diff --exit-code -- sluice/wire/v1 crds docs/reference charts/sluice/files sluice/api/schema/kubernetes_fields.json

clean:
	rm -rf $(VENV) .venv-agents .venv-gym .venv-openenv .venv-python-3.12 .venv-python-3.13 .venv-trl .venv-verifiers .venv-verl .venv-vllm site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache runs
	rm -rf examples/quickstart/model examples/quickstart/*.jsonl
