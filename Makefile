.DEFAULT_GOAL := help
.PHONY: help check lint types contracts test test-fast test-slow exhaustive chaos simulate fuzz fuzz-amplification neighbour soak sdk-watch format proto release constraints docs \
	reference vendor aot decode-guard gpu gpu-rl gpu-wheels real

help:  ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

check: lint types contracts test  ## run the checks of CI except the slow tests

lint:  ## check format, lint rules, spelling, docstrings, Markdown tables and style
	ruff format --check .
	ruff check .
	codespell
	python tests/repo/prose.py
	python tests/repo/style.py

types:  ## check types
	pyright
	pyright -p benchmarks

contracts:  ## check which package may import which
	lint-imports

test:  ## run the tests that are not marked slow
	pytest -n 3

test-fast:  ## run the tests that need neither JAX nor PostgreSQL (about a minute)
	pytest -n 3 -m "not slow and not postgres" $(FAST)

FAST = tests/unit/contract tests/unit/store tests/unit/engine tests/unit/server tests/unit/apps tests/unit/tools/commands tests/unit/backends/test_fake.py tests/contract/test_fake.py

SLOW = slow and not exhaustive and not gpu and not network
SLOW_JAX = tests/conformance tests/contract tests/unit

test-slow:  ## run the slow tests (cookbook recipes, kill tests, conformance), and tests of bits as the product compiles
	pytest -n 3 -m "not slow and bits"
	XLA_FLAGS="$$(python -m tests.support.fast_jit)" pytest -n 3 -m "$(SLOW) and tolerance"
	pytest -n 3 -m "$(SLOW) and not tolerance" $(SLOW_JAX)
	pytest -n 3 -m "$(SLOW) and not tolerance" $(SLOW_JAX:%=--ignore=%)

exhaustive:  ## run the tests that CI leaves out, before a release: every model family in every suite (an hour)
	pytest -n 3 -m "exhaustive and not gpu and not network"

chaos:  ## kill processes while clients train (5 minutes); FLAGS=--postgresql for PostgreSQL
	python -u -W ignore -m tests.support.chaos --kills 220 --jax-kills 24 --bf16-kills 12 $(FLAGS)

simulate:  ## run 100,000 simulated histories with faults (hours); FLAGS="--histories 2000 --seed 7" for others
	python -u -W ignore -m tests.support.simulation --histories 100000 --jobs $$(nproc) $(FLAGS)

fuzz:  ## send generated input to routes and decoders (25 minutes)
	python -u -W ignore -m tests.support.fuzz

fuzz-amplification:  ## measure the cost of repetitive request bodies for the server and other clients (6 minutes)
	python -u -W ignore -m tests.support.fuzz.amplification $(FLAGS)

neighbour:  ## measure what the largest calls of one owner cost another owner (10 minutes); FLAGS="--only result"
	python -u -W ignore -m tests.support.neighbour $(FLAGS)

soak:  ## keep 10,000 long polls open (15 minutes); FLAGS=--postgresql for PostgreSQL
	python -u -W ignore -m tests.support.soak --minutes 15 $(FLAGS)

sdk-watch:  ## say whether the package index has a release of tinker that is newer than the newest tested one
	python -m tests.support.sdk_watch

format:  ## format the code and fix what ruff can fix
	ruff format .
	ruff check --fix .

proto:  ## generate the protobuf modules, with an old compiler whose output runs on every supported runtime
	python -m venv build/protoc
	build/protoc/bin/pip install --quiet "grpcio-tools==1.62.3" "setuptools<80"
	build/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. skyrl_tx/server/submission/wire.proto skyrl_tx/apps/history/trace.proto

vendor:  ## fetch the vendored scripts of the console from npm again, and check their hashes
	python -m tests.support.fetch_vendored

release:  ## build and check the distributions, then print how to tag and publish
	python -m venv --clear build/release
	build/release/bin/pip install --quiet build twine
	rm -rf dist build/lib build/bdist.*
	build/release/bin/python -m build --outdir dist . > build/release/build.log
	build/release/bin/twine check --strict dist/*
	python -m venv --clear build/installed
	build/installed/bin/pip install --quiet dist/*.whl
	build/installed/bin/skyrl-tx --version
	@version=$$(build/installed/bin/skyrl-tx --version | cut -d' ' -f2); \
	grep -q "^## $$version " CHANGELOG.md || { echo "CHANGELOG.md has no section for $$version" >&2; exit 1; }; \
	test -f tests/golden/$$version.tar.xz || { echo "make its golden directory: python -m tests.support.make_golden" >&2; exit 1; }; \
	printf '%s\n' "dist/ is ready. To release it:" \
	    "  git tag --annotate v$$version --message v$$version" "  git push origin v$$version" \
	    "  build/release/bin/twine upload dist/*"

constraints:  ## write constraints.txt: the versions of all packages with which the tests pass, on the oldest Python
	python3.11 -m venv --clear build/constraints
	build/constraints/bin/pip install --quiet --upgrade '.[test]'
	build/constraints/bin/pip check
	PATH="$$PWD/build/constraints/bin:$$PATH" $(MAKE) test
	{ sed '/^[^#]/d' constraints.txt; build/constraints/bin/pip freeze --exclude skyrl-tx-server; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

docs:  ## build the documentation site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

aot:  ## compile models for GPUs and TPUs without having them, into docs/internals/measurements/compiled.md (hours; can be stopped and continued); FLAGS="--models Qwen3-8B"
	python -m benchmarks.bench_aot $(FLAGS)

decode-guard: PYTHON = python3.12
decode-guard:  ## count the kernels and bytes of a decode step for an H200 with JAX 0.11, which needs Python 3.12; PYTHON=python3.13
	$(PYTHON) -m venv --clear build/decode-guard
	build/decode-guard/bin/python -m pip install --quiet --editable '.[test]' 'jax==0.11.*'
	SKYRL_TX_REQUIRE_ENVIRONMENTS=1 build/decode-guard/bin/python -m pytest -q -m slow -k decode_step tests/unit/benchmarks/test_plan_programs.py

gpu:  ## test the GPU of this machine and measure its speed (under nine minutes; can be stopped and continued); FLAGS="--models Qwen3-8B"
	python -m benchmarks.bench_gpu $(FLAGS)

gpu-rl:  ## measure end-to-end reinforcement learning on this GPU, compared with transformers (under ten minutes; can be stopped and continued); FLAGS="--model Qwen3.5-4B"
	python -m benchmarks.bench_gpu_rl $(FLAGS)

real:  ## serve, train, kill, export and merge pretrained models, compared with transformers (1 to 2 hours on two cores; can be stopped and continued); FLAGS="--base-model Qwen/Qwen3-8B"
	python -m benchmarks.bench_real $(FLAGS)

gpu-wheels:  ## download the packages that a GPU host without a network needs into build/wheels
	python -m benchmarks.collect_wheels

reference:  ## generate docs/reference, the tables of docs/guides/which_model.md and examples/config.yaml (2 minutes)
	python -m docs.generate_reference
	python -m docs.which_model
