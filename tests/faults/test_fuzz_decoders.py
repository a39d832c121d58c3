"""For any bytes, the decoders return a request or raise their own errors, within bounded memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.schemas.training import TensorData
from skyrl_tx.server.submission.tensors import DenseBudget, from_json
from tests.support.fuzz.decoders import DECODERS, LIMIT, check_decoder
from tests.support.fuzz.reports import ExcessiveMemory, Tally, examples, mutations, tracing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _trace_memory() -> Iterator[None]:
    with tracing():
        yield


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_raise_only_their_own_errors(name: str) -> None:
    decoder, tally = DECODERS[name], Tally()

    @examples(50)
    @given(decoder.inputs)
    def check(whole: bytes) -> None:
        for raw in mutations(whole, 4):
            check_decoder(tally, decoder.read, raw)

    check()
    assert tally.num_inputs >= 250


def test_fuzz_corpus_regressions() -> None:
    kept = [json.loads(line) for line in (Path(__file__).parent / "corpus.jsonl").read_text().splitlines()]
    for row in (row for row in kept if "decoder" in row):
        check_decoder(Tally(), DECODERS[row["decoder"]].read, bytes.fromhex(row["hex"]))


def test_excessive_memory_is_detected() -> None:
    with pytest.raises(ExcessiveMemory):
        check_decoder(Tally(), lambda _: bytearray(64 * LIMIT), b"")


def test_json_sparse_tensor_is_bounded() -> None:
    tensor = TensorData(
        data=[1.0], dtype="float32", shape=[1, 2**40], sparse_crow_indices=[0, 1], sparse_col_indices=[0]
    )
    with pytest.raises(UserError, match="exceeds the dense size that this server allows"):
        from_json(tensor, DenseBudget(LIMIT), "t")


@pytest.mark.slow
def test_fuzz_command_reports_every_decoder() -> None:
    command = [sys.executable, "-m", "tests.support.fuzz", "--route-inputs", "0", "--decoder-inputs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(DECODERS)
    assert all(row[2:6] == ["0"] * 4 for row in rows), done.stdout
