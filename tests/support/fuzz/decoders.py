"""Fuzz inputs for the decoders of request bodies: protobuf, zstd, sparse tensors, and JSON tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import zstandard
from hypothesis import strategies as st

from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import PROTOBUF, Body, BodyLimits
from skyrl_tx.server.routes import training
from skyrl_tx.server.schemas.base import WireModel
from skyrl_tx.server.schemas.training import ForwardBackwardRequest
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.submission import Submission, from_json
from skyrl_tx.server.submission.tensors import DenseBudget, from_proto
from tests.support.fuzz.reports import Finding, Tally

LIMIT = 2**20
LIMITS = BodyLimits(LIMIT)
MEMORY = 48 * LIMIT
"""Memory limit of one input: it may declare `LIMIT` several times, and zstd may return 16 MiB more than requested."""

SIZES = st.one_of(st.integers(-1, 5), st.sampled_from([2**20, 2**31, 2**62, 2**63 - 1, -(2**63)]))
INT64S = st.lists(st.one_of(st.integers(0, 5), SIZES), max_size=6)
NUMBERS = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**63, 10**40]), st.floats())


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder, and a strategy for nearly valid bytes."""

    inputs: st.SearchStrategy[bytes]
    read: Callable[[bytes], object]


def check_decoder(tally: Tally, read: Callable[[bytes], object], raw: bytes) -> None:
    """Decode bytes; raises a Finding for errors other than the API's and for excessive memory."""
    with tally.watch(MEMORY):
        try:
            read(raw)
        except ApiError as error:
            if error.status not in (400, 413):
                raise Finding(error.detail) from error
        except UserError as error:
            if not error.message:
                raise Finding("an error without words") from error


@st.composite
def _tensors(draw: st.DrawFn) -> wire_pb2.Tensor:
    """Draw nearly valid tensors, with small or extreme sizes and indices."""
    dtype = draw(st.sampled_from([*wire_pb2.DType.values(), 99]))
    message = wire_pb2.Tensor(shape=draw(st.lists(SIZES, max_size=4)), dtype=cast(wire_pb2.DType, dtype))
    size = draw(st.integers(0, 5)) * draw(st.sampled_from([1, 2, 4, 8]))
    values = draw(st.binary(min_size=size, max_size=size))
    if draw(st.booleans()):
        message.dense = values
        return message
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = np.array(draw(INT64S), np.int64).tobytes()
    message.sparse_csr.col_indices = np.array(draw(INT64S), np.int64).tobytes()
    return message


@st.composite
def _extreme_csr(draw: st.DrawFn) -> wire_pb2.Tensor:
    """Draw sparse tensors with consistent sizes and extreme indices."""
    count, rows = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    index = st.one_of(st.sampled_from([2**63 - 1, -(2**63), -1]), SIZES)  # some differences overflow
    inner = draw(st.lists(index, min_size=max(rows - 1, 0), max_size=max(rows - 1, 0)))
    columns = draw(st.lists(st.one_of(st.integers(0, 2), index), min_size=count, max_size=count))
    message = wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[rows, draw(st.one_of(st.just(3), SIZES))])
    message.sparse_csr.values = np.ones(count, np.float32).tobytes()
    message.sparse_csr.crow_indices = np.array([0, *inner, count][: rows + 1], np.int64).tobytes()
    message.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    return message


@st.composite
def _passes(draw: st.DrawFn) -> bytes:
    """Draw training passes, the most complex message."""
    message = wire_pb2.ForwardBackwardRequest(model_id="m", seq_id=draw(st.integers(-1, 3)))
    message.loss_fn = draw(st.sampled_from(["cross_entropy", "stable_reinforce", ""]))
    message.loss_fn_config_v2["a"].number = draw(st.floats())
    for _ in range(draw(st.integers(0, 2))):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = draw(st.binary(max_size=12))
        datum.loss_fn_inputs["weights"].CopyFrom(draw(_tensors()))
        run = datum.loss_fn_input_spans.add().sampled_tokens
        run.sequence_id, run.offset, run.length = "s", draw(st.integers(-1, 3)), draw(st.integers(-1, 3))
    return message.SerializeToString()


def _json_pass(tensor: Mapping[str, Any]) -> bytes:
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"weights": tensor}}
    asked = {"model_id": "m", "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    return json.dumps(asked).encode()


_JSON_PASSES = st.fixed_dictionaries(
    {"data": st.lists(NUMBERS, max_size=4), "dtype": st.sampled_from(["int64", "float32", "int32", "bfloat16"])},
    optional={
        "shape": st.lists(st.one_of(SIZES, NUMBERS), max_size=3),
        "sparse_crow_indices": st.lists(st.one_of(SIZES, NUMBERS), max_size=4),
        "sparse_col_indices": st.lists(st.one_of(SIZES, NUMBERS), max_size=4),
    },
).map(_json_pass)

_FRAMES = st.builds(
    lambda data, times, stated: zstandard.ZstdCompressor(write_content_size=stated).compress(data * times),
    st.binary(min_size=1, max_size=20),
    st.sampled_from([0, 1, 100, 2**16, 2**20, 2**23]),
    st.booleans(),
)


def _read_tensor(raw: bytes) -> object:
    message = Body(raw, PROTOBUF, "", LIMITS).parse_message(wire_pb2.Tensor)
    return from_proto(message, DenseBudget(LIMIT), "t")


def _read_pass(raw: bytes) -> Submission:
    message = Body(raw, PROTOBUF, "", LIMITS).parse_message(wire_pb2.ForwardBackwardRequest)
    return training.pass_from_proto(message, LIMIT)


def _read_json_pass(raw: bytes) -> Submission:
    request = Body(raw, "", "", LIMITS).parse_request()

    def translate(schema: ForwardBackwardRequest) -> Submission:
        return training.pass_from_json(schema.forward_backward_input, LIMIT, backward=True)

    return from_json("model_pass", ForwardBackwardRequest, request, translate, _no_check, backward=True)


def _no_check(_: WireModel) -> None:
    """Ignore unknown fields."""


DECODERS = {
    "tensors": Decoder(_tensors().map(lambda tensor: tensor.SerializeToString()), _read_tensor),
    "CSR indices": Decoder(_extreme_csr().map(lambda tensor: tensor.SerializeToString()), _read_tensor),
    "protobuf passes": Decoder(_passes(), _read_pass),
    "JSON passes": Decoder(_JSON_PASSES, _read_json_pass),
    "zstd frames": Decoder(_FRAMES, lambda raw: Body(raw, "", "zstd", LIMITS).decompress()),
    "malformed JSON": Decoder(
        st.one_of(st.binary(max_size=200), st.text(alphabet='{}[]",:\\u019eE-.x\0', max_size=60).map(str.encode)),
        lambda raw: Body(raw, "", "", LIMITS).parse_model(ForwardBackwardRequest),
    ),
    "malformed protobuf": Decoder(st.binary(max_size=200), _read_pass),
}
"""Decoders by name."""
