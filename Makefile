.PHONY: check lint types contracts test chaos fuzz soak format proto

check: lint types contracts test  ## everything CI runs, except the slow tests

lint:
	ruff format --check .
	ruff check .

types:
	pyright

contracts:
	lint-imports

test:
	pytest -n 2

chaos:  ## hundreds of kills while clients train; prints the tables of docs/reliability.md; FLAGS=--postgresql has them there
	python -u -W ignore -m skyrl_tx.testing.chaos --kills 220 --jax-kills 24 --bf16-kills 12 $(FLAGS)

fuzz:  ## hundreds of thousands of inputs for routes and decoders; prints the table of docs/reliability.md
	python -u -W ignore -m skyrl_tx.testing.fuzz

soak:  ## ten thousand futures wait for fifteen minutes; prints the table of docs/reliability.md
	python -u -W ignore -m skyrl_tx.testing.soak --minutes 15 $(FLAGS)

format:
	ruff format .
	ruff check --fix .

proto:  ## regenerate the wire module; by an older compiler, whose output runs with every protobuf runtime we allow
	python -m venv build/protoc
	build/protoc/bin/pip install --quiet "grpcio-tools==1.62.3" "setuptools<80"
	build/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. skyrl_tx/api/proto/wire.proto
