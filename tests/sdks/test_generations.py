"""Every generation of the SDK makes its first run against one server: same numbers, each in its own dialect."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.api.schemas import inputs, sampling, service, training, weights
from skyrl_tx.api.wire import PROTOBUF, Body
from skyrl_tx.testing.client_environments import SDKS, ClientEnvironment, PreparedEnvironment
from skyrl_tx.testing.live_house import PUBLIC_NAME, House, live_house
from skyrl_tx.testing.wiretap import Call

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "first_run.py"
CLIENT = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
NEWEST = "0.38.0"
LARGE_RESULT_BYTES = 4096  # smaller than what the run's longest pass gives
NUM_CHUNKED = 1100
CLONE_BLOCK = 10**9
OK = {HTTPStatus.OK, HTTPStatus.NO_CONTENT}
# What a bad line makes of answers, by the path and the kind of result: all that clients know to live with.
LOSSES = {
    ("create_session", None): [503],
    ("create_model", None): [500, 503],
    ("forward_backward", None): [503, 500, 408],
    ("optim_step", None): [408, 409],
    ("save_weights", None): [500],
    ("save_weights_for_sampler", None): [503],
    ("load_weights", None): [503],
    ("asample", None): [429, 503],
    ("retrieve_future", "ForwardBackward"): [408, 500, 503],
    ("retrieve_future", "OptimStep"): [408, 502],
    ("retrieve_future", "SaveWeights"): [504],
    ("retrieve_future", "Sample"): [500, 410],
}
# What each release says of itself, and no other result.
OWN = ("version", "fields", "image", "image_step", "recovered", "closed")
# What the calls of a run send, by the names that the SDK gives it; the rest is checked with the installed release.
SCHEMAS = {
    "AdamParams": training.AdamParams,
    "CreateModelRequest": training.CreateModelRequest,
    "CreateSamplingSessionRequest": sampling.CreateSamplingSessionRequest,
    "CreateSessionRequest": service.CreateSessionRequest,
    "Datum": inputs.Datum,
    "EncodedTextChunk": inputs.Chunk,
    "ForwardBackwardInput": training.PassInput,
    "ImageAssetPointerChunk": inputs.Chunk,
    "ImageChunk": inputs.Chunk,
    "LoadWeightsRequest": weights.LoadWeightsRequest,
    "LoraConfig": training.LoraConfig,
    "SampleRequest": sampling.SampleRequest,
    "SamplingParams": sampling.SamplingParams,
    "SaveWeightsForSamplerRequest": weights.SaveWeightsForSamplerRequest,
    "SaveWeightsRequest": weights.SaveWeightsRequest,
    "TensorData": inputs.TensorData,
}
ERRORS = ("bad_data", "poisoned", "bad_chunk", "poisoned_again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a client said of its run, and what it sent."""

    seen: dict[str, Any]
    calls: list[Call]

    def to(self, path: str) -> list[Call]:
        """The calls of one path, in the order of their answers."""
        return [call for call in self.calls if call.path == path]

    def json(self, path: str) -> list[dict[str, Any]]:
        """What was sent there as JSON."""
        return [json.loads(call.body) for call in self.to(path) if call.headers["content-type"] != PROTOBUF]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("house")
    with live_house("fake", directory, large_result_bytes=LARGE_RESULT_BYTES) as house:
        yield house


@pytest.fixture(scope="module")
def slow_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with live_house("fake", tmp_path_factory.mktemp("slow"), token_delay_s=0.02) as house:
        yield house


@pytest.fixture(scope="module")
def run(house: House, client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> Callable[[str], Run]:
    """Give the run of a generation, made once."""
    runs: dict[str, Run] = {}

    def get(version: str) -> Run:
        if version not in runs:
            runs[version] = first_run(house, client_environment(SDKS[version]))
        return runs[version]

    return get


def first_run(house: House, environment: PreparedEnvironment) -> Run:
    with house.wiretap.listening() as calls:
        done = replace(environment, variables=CLIENT).run(PROGRAM, house.url, timeout_s=120.0)
    return Run(seen=json.loads(done.stdout.splitlines()[-1]), calls=list(calls))


def addressed(call: Call) -> tuple[str | None, int]:
    """The model that a call is for, and its place there."""
    if call.headers["content-type"] == PROTOBUF:
        return proto(call).model_id, proto(call).seq_id
    body = json.loads(call.body or b"{}")
    return body.get("model_id"), body.get("seq_id") or 1


@pytest.mark.parametrize("version", SDKS)
def test_a_bad_line_changes_no_number(
    house: House,
    run: Callable[[str], Run],
    client_environment: Callable[[ClientEnvironment], PreparedEnvironment],
    version: str,
) -> None:
    """Requests took effect, and their answers were lost: each is sent again, and done once."""
    for (path, kind), statuses in LOSSES.items():
        house.wiretap.lose_answers(path, list(map(HTTPStatus, statuses)), kind)
    stormy = first_run(house, client_environment(SDKS[version]))
    lost = sorted(call.status for call in stormy.calls if call.status not in OK)
    assert lost == sorted(status for statuses in LOSSES.values() for status in statuses)
    assert numbers(stormy) == numbers(run(version))


def numbers(run: Run) -> dict[str, Any]:
    """All that must be the same for every generation."""
    return {name: value for name, value in run.seen.items() if name not in (*OWN, *ERRORS)}


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def proto(call: Call) -> wire_pb2.ForwardBackwardRequest:
    body = Body(
        raw=call.body,
        content_type=PROTOBUF,
        encoding=call.headers.get("content-encoding", ""),
        max_bytes=2**24,
    )
    return body.message(wire_pb2.ForwardBackwardRequest)


@pytest.mark.parametrize("version", SDKS)
def test_a_first_run_gives_the_same_numbers(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    assert own.seen["version"] == version
    assert {call.status for call in own.calls} <= OK
    assert numbers(own) == numbers(run(NEWEST))


def test_what_the_numbers_are(run: Callable[[str], Run]) -> None:
    seen = run(NEWEST).seen
    assert seen["served"] == PUBLIC_NAME and seen["model"] == [PUBLIC_NAME, 8, True]
    losses = [row["loss:sum"] for row in seen["steps"]]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
    assert list(map(len, seen["forward"])) == [5, 3]
    assert seen["samples"] == seen["again"] == seen["clone"]
    assert seen["logprobs"][0] is None and seen["logprobs"] != seen["base_logprobs"]
    resumed = ("load_state", "load_state_with_optimizer", "from_state", "from_state_with_optimizer")
    assert [seen[name] for name in resumed] == [0, 0, 0, 0]
    assert seen["shapes"] == [[1 + index % 7] for index in range(NUM_CHUNKED)]
    assert seen["custom_norm"]["unclipped_grad_l2:mean"] == pytest.approx(
        2 * seen["plain_norm"]["unclipped_grad_l2:mean"]
    )
    assert seen["wide"] == [[5, 8], 0]
    assert seen["left"] == ["sampler_weights/s1"] and seen["closed"]


@pytest.mark.parametrize("version", SDKS)
def test_what_goes_wrong_is_said_in_words(run: Callable[[str], Run], version: str) -> None:
    seen = run(version).seen
    for name in ERRORS:
        assert seen[name]["kind"] == "RequestFailedError" and "weights" in seen[name]["text"], name
        assert "user" in seen[name]["category"].lower()
    if release(version) < (0, 19):  # it is for the server to refuse what it cannot read
        assert "image_asset_pointer" in seen["image"]["text"] and "image_asset_pointer" in seen["image_step"]
    else:  # the client refuses it; the id that it took is a gap
        assert seen["image"]["kind"] == "ValueError" and "image_step" not in seen
    assert seen["recovered"] > 0


@pytest.mark.parametrize("version", SDKS)
def test_each_speaks_its_own_dialect(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    passes = own.to("forward_backward")
    assert {call.headers["content-type"] == PROTOBUF for call in passes} == {release(version) >= (0, 19)}
    assert {call.headers.get("content-encoding") == "zstd" for call in passes} == {release(version) >= (0, 22, 1)}
    results = {call.headers.get("x-tinker-request-type"): call.answer_type for call in own.to("retrieve_future")}
    assert (results["Sample"] == PROTOBUF) == (release(version) >= (0, 18, 1))
    assert (results["ForwardBackward"] == PROTOBUF) == (release(version) >= (0, 19))
    assert bool(own.to("forward")) == (release(version) < (0, 22, 3))
    assert bool(own.to("client/config")) == (release(version) >= (0, 18))
    adam = own.json("optim_step")[0]["adam_params"]
    assert (adam == {"learning_rate": 0.01}) == (release(version) < (0, 18)), "defaults are not sent by the oldest"
    chunk = own.json("asample")[0]["prompt"]["chunks"][0]
    assert ("type" in chunk) == (release(version) >= (0, 18))
    # Two of the run's three resumptions are of its own; 0.24.1 and later do them in one request.
    by_load = [row for row in own.json("load_weights") if row.get("model_seq_id")]
    assert len(by_load) == (2 if release(version) >= (0, 24, 1) else 0)
    assert len(own.json("weights_info")) == (1 if by_load else 3)


@pytest.mark.parametrize("version", SDKS)
def test_all_that_each_can_say_is_known(run: Callable[[str], Run], version: str) -> None:
    fields = run(version).seen["fields"]
    for name, schema in SCHEMAS.items():
        assert set(fields[name]) <= set(schema.model_fields), name


@pytest.mark.parametrize("version", SDKS)
def test_chunks_come_in_the_order_of_each_release(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    if release(version) < (0, 19):
        counts = [len(row["forward_backward_input"]["data"]) for row in own.json("forward_backward")]
    else:
        counts = [len(proto(call).data) for call in own.to("forward_backward")]
    chunks = [1024, NUM_CHUNKED - 1024]
    sent = [count for count in counts if count in chunks][:2]
    if release(version) < (0, 18, 2):
        assert sent == chunks
    elif release(version) < (0, 20):  # it sends both at once: either may arrive first
        assert sorted(sent) == sorted(chunks)
    else:  # it waits for the answer to the rest, and only then sends the first
        assert sent == chunks[::-1]


@pytest.mark.parametrize("version", SDKS)
def test_a_request_that_a_client_gives_up_leaves_a_gap(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    first = own.json("optim_step")[0]["model_id"]
    rows = [row for call in own.calls if call.method == "POST" for row in [addressed(call)] if row[0] == first]
    ids = {seq_id for _, seq_id in rows}
    assert set(range(1, max(ids) + 1)) - ids == ({max(ids) - 3} if release(version) >= (0, 19) else set())


@pytest.mark.parametrize("version", SDKS)
def test_sparse_tensors_and_long_ids_and_large_results(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    if release(version) >= (0, 19):
        tensors = [
            tensor
            for call in own.to("forward_backward")
            for datum in proto(call).data
            for tensor in datum.loss_fn_inputs.values()
        ]
        assert sum(tensor.HasField("sparse_csr") for tensor in tensors) >= 2
    elif release(version) >= (0, 18):
        assert b"sparse_crow_indices" in b"".join(call.body for call in own.to("forward"))
    longest = max(row["seq_id"] for row in own.json("asample"))
    assert longest >= CLONE_BLOCK
    asked = [row["allow_metadata_only"] for row in own.json("retrieve_future")]
    assert asked.count(False) >= 1, "what is large is announced first, then fetched"


@pytest.mark.parametrize("version", SDKS)
def test_samples_are_announced_and_clones_join(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    polls = own.json("retrieve_futures")
    assert bool(polls) == (release(version) >= (0, 26))
    clones = {row["target"]["cloned_sampler_id"] for row in polls}
    assert len(clones) >= 2 or not polls, "the client itself, and its copy"
    assert len(own.to("join_sampling_session")) == (1 if release(version) >= (0, 33) else 0)


@pytest.mark.parametrize("version", [version for version in SDKS if release(version) >= (0, 26)])
def test_a_sample_that_is_given_up_is_cancelled(
    slow_house: House, client_environment: Callable[[ClientEnvironment], PreparedEnvironment], version: str
) -> None:
    environment = replace(client_environment(SDKS[version]), variables=CLIENT)
    with slow_house.wiretap.listening() as calls:
        environment.run(PROGRAM.with_name("give_up.py"), slow_house.url, timeout_s=60.0)
    (cancelled,) = [call for call in calls if call.path == "cancel_future"]
    assert cancelled.status == HTTPStatus.OK
