"""Eight SDK releases make the same run against one server and get the same results, each with its own protocol."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.server.http.body import PROTOBUF, Body, BodyLimits
from skyrl_tx.server.schemas import service, training, weights
from skyrl_tx.server.submission import wire_pb2
from tests.support.client_environments import SDKS, ClientEnvironment, PreparedEnvironment
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack
from tests.support.recording_middleware import Call

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "first_run.py"
CLIENT = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
NEWEST = "0.38.0"
RETRYING = ("0.16.1", NEWEST)
"""Releases that CI disturbs: the first with JSON, with protobuf and with batched polls, and the newest.

All releases make the undisturbed run.
"""
LARGE_RESULT_BYTES = 4096  # less than the longest result of the run
NUM_CHUNKED = 1100
CLONE_BLOCK = 10**9
OK = {HTTPStatus.OK, HTTPStatus.NO_CONTENT}
# Statuses that replace lost responses, by path and kind of result. Clients retry all of these.
LOST_RESPONSES = {
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
# Results that differ by release.
OWN = ("version", "fields", "image", "image_step", "recovered", "closed", "links", "session_id")
# Request types of the run by their names in the SDK. A unit test checks all types of the installed release.
SCHEMAS = {
    "AdamParams": training.AdamParams,
    "CreateModelRequest": training.CreateModelRequest,
    "CreateSamplingSessionRequest": training.CreateSamplingSessionRequest,
    "CreateSessionRequest": service.CreateSessionRequest,
    "Datum": training.WireDatum,
    "EncodedTextChunk": training.InputChunk,
    "ForwardBackwardInput": training.PassInput,
    "ImageAssetPointerChunk": training.InputChunk,
    "ImageChunk": training.InputChunk,
    "LoadWeightsRequest": weights.LoadWeightsRequest,
    "LoraConfig": training.LoraConfig,
    "SampleRequest": training.AsampleRequest,
    "SamplingParams": training.WireSamplingParams,
    "SaveWeightsForSamplerRequest": weights.SaveWeightsForSamplerRequest,
    "SaveWeightsRequest": weights.SaveWeightsRequest,
    "TensorData": training.TensorData,
}
ERRORS = ("bad_data", "incomplete", "bad_chunk", "incomplete_again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results that a client printed, and the calls that the server received."""

    results: dict[str, Any]
    calls: list[Call]

    def to(self, path: str) -> list[Call]:
        """Return the calls of one path, in the order of their responses."""
        return [call for call in self.calls if call.path == path]

    def json(self, path: str) -> list[dict[str, Any]]:
        """Return the JSON bodies of the calls of one path."""
        return [json.loads(call.body) for call in self.to(path) if call.headers["content-type"] != PROTOBUF]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    directory = tmp_path_factory.mktemp("stack")
    with live_stack("fake", directory, large_result_bytes=LARGE_RESULT_BYTES) as stack:
        yield stack


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path_factory.mktemp("slow"), token_delay_s=0.02) as stack:
        yield stack


@pytest.fixture(scope="module")
def run(
    stack: LiveStack, client_environment: Callable[[ClientEnvironment], PreparedEnvironment]
) -> Callable[[str], Run]:
    """A function that returns the run of a release. Each run is made once."""
    runs: dict[str, Run] = {}

    def get(version: str) -> Run:
        if version not in runs:
            runs[version] = first_run(stack, client_environment(SDKS[version]))
        return runs[version]

    return get


def first_run(stack: LiveStack, environment: PreparedEnvironment) -> Run:
    with stack.recorder.recording() as calls:
        done = replace(environment, variables=CLIENT).run(PROGRAM, stack.url, timeout_s=120.0)
    return Run(results=json.loads(done.stdout.splitlines()[-1]), calls=list(calls))


def model_and_seq_id(call: Call) -> tuple[str | None, int]:
    """Return the model id and the sequence number of a call."""
    if call.headers["content-type"] == PROTOBUF:
        return parse_proto(call).model_id, parse_proto(call).seq_id
    body = json.loads(call.body or b"{}")
    return body.get("model_id"), body.get("seq_id") or 1


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=() if version in RETRYING else pytest.mark.exhaustive) for version in SDKS],
)
def test_lost_responses_change_no_result(
    stack: LiveStack,
    run: Callable[[str], Run],
    client_environment: Callable[[ClientEnvironment], PreparedEnvironment],
    version: str,
) -> None:
    """If a response is lost, the client sends the request again. The server executes it once."""
    for (path, kind), statuses in LOST_RESPONSES.items():
        stack.recorder.replace_responses(path, list(map(HTTPStatus, statuses)), kind)
    disturbed = first_run(stack, client_environment(SDKS[version]))
    lost = sorted(call.status for call in disturbed.calls if call.status not in OK)
    assert lost == sorted(status for statuses in LOST_RESPONSES.values() for status in statuses)
    assert get_numbers(disturbed) == get_numbers(run(version))


def get_numbers(run: Run) -> dict[str, Any]:
    """Return the results that must be equal for all releases."""
    return {name: value for name, value in run.results.items() if name not in (*OWN, *ERRORS)}


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def parse_proto(call: Call) -> wire_pb2.ForwardBackwardRequest:
    body = Body(
        raw=call.body,
        content_type=PROTOBUF,
        encoding=call.headers.get("content-encoding", ""),
        limits=BodyLimits(2**24),
    )
    return body.parse_message(wire_pb2.ForwardBackwardRequest)


@pytest.mark.parametrize("version", SDKS)
def test_all_releases_get_the_same_results(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    assert own.results["version"] == version
    assert {call.status for call in own.calls} <= OK
    assert get_numbers(own) == get_numbers(run(NEWEST))


def test_results_of_the_newest_release(run: Callable[[str], Run]) -> None:
    results = run(NEWEST).results
    assert results["served"] == PUBLIC_NAME and results["model"] == [PUBLIC_NAME, 8, True]
    losses = [row["loss:sum"] for row in results["steps"]]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
    assert list(map(len, results["forward"])) == [5, 3]
    assert results["samples"] == results["again"] == results["clone"]
    assert results["logprobs"][0] is None and results["logprobs"] != results["base_logprobs"]

    resumed = ("load_state", "load_state_with_optimizer", "from_state", "from_state_with_optimizer")
    assert [results[name] for name in resumed] == [0, 0, 0, 0]
    assert results["shapes"] == [[1 + index % 7] for index in range(NUM_CHUNKED)]
    assert results["custom_norm"]["unclipped_grad_l2:mean"] == pytest.approx(
        2 * results["plain_norm"]["unclipped_grad_l2:mean"]
    )
    assert results["wide"] == [[5, 8], 0]
    assert results["left"] == ["sampler_weights/s1"] and results["closed"]


@pytest.mark.parametrize("version", SDKS)
def test_errors_name_the_invalid_field(run: Callable[[str], Run], version: str) -> None:
    results = run(version).results
    for name in ERRORS:
        assert results[name]["kind"] == "RequestFailedError" and "weights" in results[name]["text"], name
        assert "user" in results[name]["category"].lower()
    if release(version) < (0, 19):  # the server refuses the image
        assert "image_asset_pointer" in results["image"]["text"] and "image_asset_pointer" in results["image_step"]
    else:  # the client refuses the image, and its sequence number is a gap
        assert results["image"]["kind"] == "ValueError" and "image_step" not in results
    assert results["recovered"] > 0


@pytest.mark.parametrize("version", SDKS)
def test_every_release_logs_the_address_of_its_session(
    stack: LiveStack, run: Callable[[str], Run], version: str
) -> None:
    results = run(version).results
    (message,) = results["links"]
    link, *advice, losses = message.splitlines()
    assert link == f"live: {stack.url}/sessions/{results['session_id']}"
    assert len(advice) <= 1 and all(line.startswith("last run ") for line in advice)
    assert losses.startswith("loss stable_reinforce: ")


@pytest.mark.parametrize("version", SDKS)
def test_encoding_and_endpoints_of_each_release(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    passes = own.to("forward_backward")
    assert {call.headers["content-type"] == PROTOBUF for call in passes} == {release(version) >= (0, 19)}
    assert {call.headers.get("content-encoding") == "zstd" for call in passes} == {release(version) >= (0, 22, 1)}

    results = {call.headers.get("x-tinker-request-type"): call.response_type for call in own.to("retrieve_future")}
    assert (results["Sample"] == PROTOBUF) == (release(version) >= (0, 18, 1))
    assert (results["ForwardBackward"] == PROTOBUF) == (release(version) >= (0, 19))
    assert bool(own.to("forward")) == (release(version) < (0, 22, 3))
    assert bool(own.to("client/config")) == (release(version) >= (0, 18))
    adam = own.json("optim_step")[0]["adam_params"]
    assert (adam == {"learning_rate": 0.01}) == (release(version) < (0, 18)), (
        "the oldest release does not send defaults"
    )

    chunk = own.json("asample")[0]["prompt"]["chunks"][0]
    assert ("type" in chunk) == (release(version) >= (0, 18))
    # Two of the run's three resumptions create a model; 0.24.1 and later load it in the same request.
    by_load = [row for row in own.json("load_weights") if row.get("model_seq_id")]
    assert len(by_load) == (2 if release(version) >= (0, 24, 1) else 0)
    assert len(own.json("weights_info")) == (1 if by_load else 3)


@pytest.mark.parametrize("version", SDKS)
def test_schemas_have_every_field_of_each_release(run: Callable[[str], Run], version: str) -> None:
    fields = run(version).results["fields"]
    for name, schema in SCHEMAS.items():
        assert set(fields[name]) <= set(schema.model_fields), name


@pytest.mark.parametrize("version", SDKS)
def test_order_of_chunks_of_each_release(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    if release(version) < (0, 19):
        counts = [len(row["forward_backward_input"]["data"]) for row in own.json("forward_backward")]
    else:
        counts = [len(parse_proto(call).data) for call in own.to("forward_backward")]

    chunks = [1024, NUM_CHUNKED - 1024]
    sent = [count for count in counts if count in chunks][:2]
    if release(version) < (0, 18, 2):
        assert sent == chunks
    elif release(version) < (0, 20):  # both are sent concurrently: either may arrive first
        assert sorted(sent) == sorted(chunks)
    else:  # the first chunk is sent after the response to the other chunks
        assert sent == chunks[::-1]


@pytest.mark.parametrize("version", SDKS)
def test_a_request_refused_by_the_client_leaves_a_sequence_gap(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    first = own.json("optim_step")[0]["model_id"]
    rows = [row for call in own.calls if call.method == "POST" for row in [model_and_seq_id(call)] if row[0] == first]
    ids = {seq_id for _, seq_id in rows}
    assert set(range(1, max(ids) + 1)) - ids == ({max(ids) - 3} if release(version) >= (0, 19) else set())


@pytest.mark.parametrize("version", SDKS)
def test_sparse_tensors_and_long_ids_and_large_results(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    if release(version) >= (0, 19):
        tensors = [
            tensor
            for call in own.to("forward_backward")
            for datum in parse_proto(call).data
            for tensor in datum.loss_fn_inputs.values()
        ]
        assert sum(tensor.HasField("sparse_csr") for tensor in tensors) >= 2
    elif release(version) >= (0, 18):
        assert b"sparse_crow_indices" in b"".join(call.body for call in own.to("forward"))

    longest = max(row["seq_id"] for row in own.json("asample"))
    assert longest >= CLONE_BLOCK
    asked = [row["allow_metadata_only"] for row in own.json("retrieve_future")]
    assert asked.count(False) >= 1, "the size of a large result is sent before the result"


@pytest.mark.parametrize("version", SDKS)
def test_batched_polls_and_cloned_samplers_by_release(run: Callable[[str], Run], version: str) -> None:
    own = run(version)
    polls = own.json("retrieve_futures")
    assert bool(polls) == (release(version) >= (0, 26))
    clones = {row["target"]["cloned_sampler_id"] for row in polls}
    assert len(clones) >= 2 or not polls, "the client and its clone"
    assert len(own.to("join_sampling_session")) == (1 if release(version) >= (0, 33) else 0)


@pytest.mark.parametrize("version", [version for version in SDKS if release(version) >= (0, 26)])
def test_an_abandoned_sample_is_cancelled(
    slow_stack: LiveStack, client_environment: Callable[[ClientEnvironment], PreparedEnvironment], version: str
) -> None:
    environment = replace(client_environment(SDKS[version]), variables=CLIENT)
    with slow_stack.recorder.recording() as calls:
        environment.run(PROGRAM.with_name("abandon_sample.py"), slow_stack.url, timeout_s=60.0)
    (cancelled,) = [call for call in calls if call.path == "cancel_future"]
    assert cancelled.status == HTTPStatus.OK
