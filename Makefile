.PHONY: check lint types contracts test format proto

check: lint types contracts test  ## everything CI runs, except the slow tests

lint:
	ruff format --check .
	ruff check .

types:
	pyright

contracts:
	lint-imports

test:
	pytest

format:
	ruff format .
	ruff check --fix .

proto:  ## regenerate the wire module from its .proto
	python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. skyrl_tx/api/proto/wire.proto
