"""Whatever bytes arrive, the decoders give a request or one of their own errors, within bounded memory."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from skyrl_tx.api.schemas.inputs import TensorData
from skyrl_tx.api.tensors import DenseBudget, from_json
from skyrl_tx.contract.errors import UserError
from skyrl_tx.testing.fuzz_decoders import DECODERS, LIMIT, survives
from skyrl_tx.testing.fuzzing import Hunger, Tally, examples, mutations, tracing


@pytest.fixture(scope="module", autouse=True)
def _traced() -> Iterator[None]:
    with tracing():
        yield


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_survive(name: str) -> None:
    decoder, tally = DECODERS[name], Tally()

    @examples(50)
    @given(decoder.inputs)
    def check(whole: bytes) -> None:
        for raw in mutations(whole, 4):
            survives(tally, decoder.read, raw)

    check()
    assert tally.num_inputs >= 250


def test_what_was_found_once_stays_mended() -> None:
    kept = [json.loads(line) for line in (Path(__file__).parent / "corpus.jsonl").read_text().splitlines()]
    for row in (row for row in kept if "decoder" in row):
        survives(Tally(), DECODERS[row["decoder"]].read, bytes.fromhex(row["hex"]))


def test_memory_is_seen() -> None:
    with pytest.raises(Hunger):
        survives(Tally(), lambda _: bytearray(64 * LIMIT), b"")


def test_a_sparse_tensor_of_json_is_bounded_too() -> None:
    tensor = TensorData(
        data=[1.0], dtype="float32", shape=[1, 2**40], sparse_crow_indices=[0, 1], sparse_col_indices=[0]
    )
    with pytest.raises(UserError, match="more than this server makes dense"):
        from_json(tensor, DenseBudget(LIMIT), "t")
