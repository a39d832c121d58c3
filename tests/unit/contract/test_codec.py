"""Records survive encoding and decoding, and other values are rejected."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from skyrl_tx.contract import codec, requests, results
from skyrl_tx.contract.arrays import Cells
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ArtifactId, ModelId, SamplerId

LORA = requests.ModelSpec(lora=requests.LoraSpec(rank=8, seed=2**63, train_mlp=False))
FLOATS = np.array([-0.5, np.nan, np.inf], np.float32)

RECORDS = [
    requests.CreateModel(base_model="tiny", spec=LORA),
    requests.OptimStep(params=requests.OptimizerParams(learning_rate=3e-4)),
    requests.SaveWeights(kind="weights", name="a", ttl_s=3600, overwrite=True, user_metadata={"k": "v"}),
    requests.LoadWeights(path="p", artifact_id=ArtifactId("x"), spec=LORA, optimizer=True, create=False),
    requests.UnloadModel(),
    requests.Rejected(kind="model_pass", message="data is empty", backward=True),
    results.CreateModelOutput(model_id=ModelId("s:train:0")),
    results.OptimStepOutput(metrics={"step": 1.0}),
    results.Failure(message="no", category=ErrorCategory.USER),
]

PINNED = json.loads((Path(__file__).parents[2] / "golden" / "codec.json").read_text(encoding="utf-8"))
STORED_KINDS = sorted(
    {msgspec.msgpack.decode(bytes.fromhex(data))[1] for records in PINNED.values() for data in records.values()}
)


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_stored_bytes_of_every_kind_are_known(kind: str) -> None:
    with pytest.raises(codec.CodecError, match="unreadable record") as raised:
        codec.decode(msgspec.msgpack.encode([codec.VERSION, kind, "no record"]))
    assert "unknown kind" not in str(raised.value)


@pytest.mark.parametrize("record", RECORDS, ids=codec.get_kind)
def test_a_record_without_arrays_comes_back_equal(record: requests.Request) -> None:
    assert codec.decode(codec.encode(record)) == record


def test_arrays_come_back_bit_equal_with_dtype_and_shape() -> None:
    targets = np.arange(6, dtype=np.int64).reshape(3, 2)
    datum = requests.Datum(
        tokens=np.arange(3, dtype=np.int32), loss_inputs={"target_tokens": targets, "logprobs": FLOATS}
    )
    sent = requests.ModelPass(data=(datum,), loss="ppo", loss_config={"beta": 0.1, "mode": "x"}, backward=True)
    got = codec.decode(codec.encode(sent))
    assert isinstance(got, requests.ModelPass)
    inputs = got.data[0].loss_inputs
    assert inputs["target_tokens"].shape == (3, 2) and inputs["target_tokens"].dtype == np.int64
    assert inputs["logprobs"].tobytes() == FLOATS.tobytes()
    assert got.data[0].tokens.dtype == np.int32 and got.loss_config == sent.loss_config


def test_a_seed_keeps_its_64_bits_and_an_empty_array_its_dtype() -> None:
    params = requests.SamplingParams(seed=2**64 - 1, stop_token_ids=(1, 2), stop_strings=("\n",), eos_stops=False)
    sample = requests.Sample(
        prompt=np.zeros(0, np.int32), num_samples=2, sampler=SamplerId("a"), params=params, sequence_ids=("q-0", "q-1")
    )
    got = codec.decode(codec.encode(sample))
    assert isinstance(got, requests.Sample)
    assert got.params == params and got.sequence_ids == ("q-0", "q-1")
    assert got.prompt.dtype == np.int32 and got.prompt.shape == (0,)


def test_the_cells_that_a_prompt_asks_for_come_back() -> None:
    cells = Cells(crow=np.array([0, 1, 3]), columns=np.array([4, 2, 0]))
    sent = requests.Sample(
        prompt=np.zeros(3, np.int32),
        num_samples=1,
        sampler=None,
        params=requests.SamplingParams(seed=0),
        options=requests.PromptOptions(target_tokens=np.full((2, 5), -1), target_cells=cells),
    )
    got = codec.decode(codec.encode(sent))
    assert isinstance(got, requests.Sample) and got.options.target_cells is not None
    assert got.options.target_cells.of(np.arange(10).reshape(2, 5)).tolist() == [4, 7, 5]


@pytest.mark.parametrize("data", [b"", b"\x00", b"not msgpack", codec.encode(RECORDS[0])[:-3]], ids=range(4))
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(codec.CodecError):
        codec.decode(data)


def test_another_version_is_refused_by_number() -> None:
    data = bytearray(codec.encode(RECORDS[0]))
    assert data[1] == codec.VERSION
    data[1] = 99
    with pytest.raises(codec.CodecError, match="version 99"):
        codec.decode(bytes(data))


def test_an_array_of_the_wrong_dtype_is_refused() -> None:
    sample = requests.Sample(
        prompt=np.zeros(2, np.float32),  # type: ignore[arg-type]
        num_samples=1,
        sampler=None,
        params=requests.SamplingParams(seed=0),
    )
    with pytest.raises(codec.CodecError, match="float32"):
        codec.decode(codec.encode(sample))


_FIRST_IN_ALL_THREADS = """
import gc, sys, threading
import msgspec
from skyrl_tx.contract import codec

sys.setswitchinterval(1e-6)
gc.set_threshold(5)
empty = [msgspec.msgpack.encode([codec.VERSION, kind, {}]) for kind in sys.argv[1:]]
barrier, outcomes = threading.Barrier(8), []

def decode():
    barrier.wait()
    for data in empty:
        try:
            outcomes.append(codec.decode(data))
        except codec.CodecError as error:
            outcomes.append(error)

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(outcomes) == 8 * len(empty)
"""


def test_threads_may_decode_the_first_records_at_once() -> None:
    """Unless decoders are created in advance, msgspec 0.22 usually crashes here with a segmentation fault."""
    subprocess.run([sys.executable, "-c", _FIRST_IN_ALL_THREADS, *STORED_KINDS], check=True, timeout=60)
