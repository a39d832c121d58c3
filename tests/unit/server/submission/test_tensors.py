from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.schemas.training import TensorData
from skyrl_tx.server.submission import tensors, wire_pb2

MEBIBYTE = 2**20


def read(message: wire_pb2.Tensor, budget: int = MEBIBYTE) -> Any:
    return tensors.from_proto(message, tensors.DenseBudget(budget), "t")


def csr(matrix: Any, **changes: Any) -> wire_pb2.Tensor:
    """Return a sparse tensor in the SDK's format, with one part replaced."""
    rows, columns = np.nonzero(matrix)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(matrix)))]).astype(np.int64)
    parts = {
        "values": matrix[rows, columns],
        "crow_indices": crow,
        "col_indices": columns.astype(np.int64),
        "shape": matrix.shape,
    } | changes
    message = wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=parts.pop("shape"))
    for name, array in parts.items():
        setattr(message.sparse_csr, name, np.asarray(array).tobytes())
    return message


@pytest.mark.parametrize("dtype", ["float32", "int64", "int32"])
def test_dense_tensors_round_trip(dtype: str) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    decoded = read(tensors.to_proto(array))
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


def test_bfloat16_is_widened() -> None:
    stored = np.array([0x3F80, 0xC000], dtype=np.uint16)  # 1.0 and -2.0
    message = wire_pb2.Tensor(dtype=wire_pb2.DTYPE_BFLOAT16, dense=stored.tobytes())
    np.testing.assert_array_equal(read(message), np.array([1.0, -2.0], np.float32))


@given(arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.sampled_from([0.0, 1.5, -2.0])))
def test_sparse_tensors_become_dense(matrix: Any) -> None:
    np.testing.assert_array_equal(read(csr(matrix)), matrix)


def test_unlisted_cells_of_a_sparse_tensor_have_the_fill_value() -> None:
    tensor = TensorData(
        data=[7, 8], dtype="int64", shape=[2, 3], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[2, 0]
    )
    dense = tensors.from_json(tensor, tensors.DenseBudget(MEBIBYTE), "t", fill=-1)
    assert dense.tolist() == [[-1, -1, 7], [8, -1, -1]]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (wire_pb2.Tensor(dtype=wire_pb2.DTYPE_INT64, dense=b"1234567"), "7 bytes"),
        (wire_pb2.Tensor(dense=b"1234"), "dtype 0"),
        (wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, dense=b"1234", shape=[2]), "shape"),
        (wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, dense=b"1234", shape=[-1, -1]), "shape"),
        (wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, dense=b"", shape=[2**62, 4, 0, -3]), "shape"),
        (csr(np.eye(3, dtype=np.float32), shape=[3]), "two sizes"),
        (csr(np.eye(3, dtype=np.float32), shape=[3, 2**60]), "exceeds the dense size that this server allows"),
        (csr(np.eye(3, dtype=np.float32), shape=[2**60, 3]), "row pointers"),
        (csr(np.zeros((1, 1), np.float32), shape=[1, 33_000_000]), "1 rows have at most 524288 columns"),
        (csr(np.eye(3, dtype=np.float32), crow_indices=np.array([0, 2, 1, 3])), "rise"),
        (csr(np.eye(3, dtype=np.float32), crow_indices=np.array([1, 1, 2, 3])), "rise"),
        # Differences that overflow to positive lengths, whose sum overflows to the right total.
        (
            csr(np.eye(4, 3, dtype=np.float32), crow_indices=np.array([0, 2**63 - 1, -(2**63), -1, 3])),
            "rise",
        ),
        (wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[0, 2**62, 2**62]), "too large"),
        (csr(np.eye(0, dtype=np.float32), shape=[0, 2**63 - 1]), "exceeds the dense size that this server allows"),
        (csr(np.eye(3, dtype=np.float32), col_indices=np.array([0, 1, 3])), "column index"),
        (csr(np.eye(3, dtype=np.float32), col_indices=np.array([0, -1, 2])), "column index"),
        (csr(np.eye(3, dtype=np.float32), col_indices=np.array([0, 1])), "column indices"),
        (
            csr(np.ones((2, 3), np.float32), col_indices=np.array([0, 1, 2, 2, 0, 2])),
            "row 1 lists column index 2 twice",
        ),
    ],
)
def test_broken_tensors_are_refused(message: wire_pb2.Tensor, text: str) -> None:
    with pytest.raises(UserError, match=text):
        read(message)


def test_dense_size_is_bounded_per_request() -> None:
    budget = tensors.DenseBudget(1000)
    message = csr(np.eye(2, dtype=np.float32), shape=[2, 100])
    tensors.from_proto(message, budget, "first")
    with pytest.raises(UserError, match="second: shape"):
        tensors.from_proto(message, budget, "second")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_json_numbers_are_not_rounded_to_integers(dtype: Literal["int32", "int64"]) -> None:
    whole = tensors.from_json(TensorData(data=[1.0, 2.0], dtype=dtype), tensors.DenseBudget(100), "a")
    assert whole.dtype == dtype and whole.tolist() == [1, 2]
    with pytest.raises(UserError, match=r"target_tokens\[1\] 1.7 must be from"):
        tensors.from_json(TensorData(data=[1, 1.7], dtype=dtype), tensors.DenseBudget(100), "target_tokens")


@pytest.mark.parametrize("place", [3, 10, 11])
def test_long_lists_are_converted_in_slices(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(tensors, "_NUMBERS_PER_SLICE", 4)
    values = list(range(12))
    assert tensors.from_numbers(values, "int32", "tokens").tolist() == values
    values[place] = 2**40
    with pytest.raises(UserError, match="tokens: not all values are int32"):
        tensors.from_numbers(values, "int32", "tokens")
