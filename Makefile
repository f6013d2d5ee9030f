# Every target sets up what it needs in .venv; the first run takes some minutes.
PYTHON ?= python3
PORT ?= 8000
# Test files that run side by side; on a GPU, whose memory they share, `make test JOBS=0`.
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready
# The tests compare with it. It asks for an older transformers than SGLang's, and works without.
KVPRESS := kvpress==0.5.5
CYCLONEDX := 7.5.0
# What images are built on; a folder with a Debian will do where there is no registry.
BASE ?= docker.io/library/python:3.11-slim-bookworm

.PHONY: install serve lm cluster demo test soak lint mutants bench quality eval eval-lm recall lock
.PHONY: release-check sbom images deploy-tools clean

install: $(READY)  ## set-up only

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(KVPRESS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

serve: install  ## gateway and SGLang on the embedded model, port 8000
	$(BIN)/sgl-kvc serve --port $(PORT)

lm: install  ## the same on SmolLM2-135M-Instruct, which is fetched first
	$(BIN)/sgl-kvc serve --embedded smollm2 --port $(PORT)

cluster: install  ## gateway, SGLang's router and two workers on the embedded model, port 8000
	$(BIN)/sgl-kvc cluster --port $(PORT)

demo: install  ## one question at rates 1 to 32, in a table
	$(BIN)/sgl-kvc demo

test: install  ## everything
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

soak: install  ## 2,000 mixed requests on the engine, every block accounted for
	KVC_SOAK=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rP tests/engine/test_stress.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

mutants: install  ## how many small faults do the unit tests notice? tests/mutants/survivors.md
	$(BIN)/python -m tests.mutants

bench: install  ## running batch and throughput at a fixed pool, off and on
	$(BIN)/python -m bench.throughput --plain --out bench/results/throughput.json

quality: install  ## accuracy of the embedded model at 1,024 tokens: docs/quality.md
	rm -rf build/quality
	$(BIN)/sgl-kvc eval --embedded --servers 2 --out build/quality --n 1000 --rates 2 4 8 16 32 \
		--tasks single needles8 needles32 copy32 votes \
		--policies kv-compress snapkv ada-kv streaming-llm random
	cp build/quality/report.md docs/quality.md
	cp build/quality/accuracy-1024-inside.png docs/
	cp build/quality/results.json bench/results/quality.json

eval: install  ## every policy, rates 2 to 64, questions inside and after: bench/results/quality/recall
	$(BIN)/sgl-kvc eval --embedded --servers 2 --out build/eval --length 1024 2048 \
		--question inside after
	mkdir -p bench/results/quality/recall
	cp build/eval/report.md build/eval/results.json build/eval/*.png bench/results/quality/recall/

eval-lm: install  ## the same on SmolLM2, in natural text: bench/results/quality/smollm2
	$(BIN)/sgl-kvc eval --embedded smollm2 --servers 2 --out build/eval-lm --length 1024 \
		--question inside after --rates 2 4 8 16 --n 40
	mkdir -p bench/results/quality/smollm2
	cp build/eval-lm/report.md build/eval-lm/results.json build/eval-lm/*.png \
		bench/results/quality/smollm2/

recall: install  ## train the embedded model again, into build/recall
	$(BIN)/python -m kvc_recall.train --out build/recall

lock: install  ## write the versions in .venv to requirements.lock, the gateway's apart
	{ head -2 requirements.lock; $(BIN)/python -m pip freeze --all --exclude pip --exclude wheel \
		--exclude sgl-kvc --exclude kvpress; } > .lock
	mv .lock requirements.lock
	$(BIN)/python deploy/lock_gateway.py > .lock
	mv .lock requirements-gateway.lock

release-check: install  ## sdist and wheel, whole and working in an empty environment
	$(BIN)/python deploy/release_check.py

sbom: install  ## what is installed, with versions and licenses, as CycloneDX: build/sbom.json
	test -x build/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom && \
		build/sbom/bin/python -m pip install --quiet cyclonedx-bom==$(CYCLONEDX); }
	build/sbom/bin/cyclonedx-py environment --output-reproducible -o build/sbom.json $(BIN)/python

images: install  ## every image, by buildah as root, and what compose runs
	$(BIN)/python deploy/images.py --base $(BASE)

deploy-tools:  ## helm, and what else the tests of deploy/ use and skip without: build/tools
	deploy/tools.sh

clean:
	rm -rf .venv build
