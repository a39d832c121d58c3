"""Converts tensors between the wire format and NumPy.

Binary formats are converted without a Python object per element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from skyrl_tx.contract.arrays import Cells, Float32Array, Int64Array, NumberArray, max_targets
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.numbers import make_integers
from skyrl_tx.server.schemas.training import TensorData
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.validation import quote_value

_BFLOAT16 = "bfloat16"
_DTYPES: dict[int, str] = {
    wire_pb2.DTYPE_FLOAT32: "float32",
    wire_pb2.DTYPE_INT64: "int64",
    wire_pb2.DTYPE_INT32: "int32",
    wire_pb2.DTYPE_BFLOAT16: _BFLOAT16,
}
_DTYPE_CODES = {name: code for code, name in _DTYPES.items()}
_MAX_DIMS = 8
_NUMBERS_PER_SLICE = 2**16
_MAX_EMPTY = 2**31 - 1
"""Maximum product of the nonzero sizes of an empty array. NumPy has a limit, too."""


@dataclass(slots=True)
class DenseBudget:
    """The memory in bytes that the sparse tensors of one request may still take in dense form.

    A sparse tensor of a few bytes may claim any width, so its size is checked before memory is
    allocated.
    """

    remaining_bytes: int

    def take(self, rows: int, columns: int, itemsize: int, where: str) -> None:
        """Reserve memory for a dense matrix.

        Raises UserError if the matrix is too large or has too many columns.
        """
        if columns > (limit := max_targets(rows)):
            raise UserError(
                f"{where}: shape [{rows}, {columns}] exceeds the dense size that this server allows: "
                f"{rows} rows have at most {limit} columns"
            )
        # A matrix without rows takes no memory, but NumPy limits its width.
        if max(rows, 1) * max(columns, 1) * itemsize > self.remaining_bytes:
            raise UserError(
                f"{where}: shape [{rows}, {columns}] exceeds the dense size that this server allows for one request"
            )
        self.remaining_bytes -= rows * columns * itemsize


def from_bytes(data: bytes, dtype: str, where: str) -> NumberArray:
    """View bytes as numbers. bfloat16 becomes float32.

    Raises UserError for an incomplete element.
    """
    stored = np.dtype("uint16" if dtype == _BFLOAT16 else dtype)
    if len(data) % stored.itemsize:
        raise UserError(f"{where}: {len(data)} bytes are not a whole number of {dtype} values")
    array: NumberArray = np.frombuffer(data, dtype=stored)
    if dtype == _BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def from_proto(message: wire_pb2.Tensor, budget: DenseBudget, where: str) -> NumberArray:
    """Read a protobuf tensor as a dense array."""
    dtype = _DTYPES.get(int(message.dtype))
    if dtype is None:
        raise UserError(f"{where}: dtype {int(message.dtype)} is not one of {', '.join(_DTYPES.values())}")
    shape = tuple(message.shape)

    if message.WhichOneof("layout") != "sparse_csr":
        values = from_bytes(message.dense, dtype, where)
        return _reshape(values, shape or values.shape, where)

    csr = message.sparse_csr
    values = from_bytes(csr.values, dtype, f"{where}.values")
    cells = Cells(
        crow=from_bytes(csr.crow_indices, "int64", f"{where}.crow_indices"),
        columns=from_bytes(csr.col_indices, "int64", f"{where}.col_indices"),
    )
    return _make_dense(values, cells, shape, budget, where)


def from_json(tensor: TensorData, budget: DenseBudget, where: str, *, fill: int = 0) -> NumberArray:
    """Read a JSON tensor as a dense array.

    `fill` is the value of cells that a sparse tensor does not list.
    """
    values = from_numbers(tensor.data, "float32" if tensor.dtype == _BFLOAT16 else tensor.dtype, where)
    cells = cells_from_json(tensor, where)
    if cells is None:
        return _reshape(values, tuple(tensor.shape) if tensor.shape is not None else values.shape, where)
    return _make_dense(values, cells, tuple(tensor.shape or ()), budget, where, fill)


def cells_from_json(tensor: TensorData, where: str) -> Cells | None:
    """Return the cells that a sparse JSON tensor lists. None for a dense tensor."""
    if tensor.sparse_crow_indices is None and tensor.sparse_col_indices is None:
        return None
    return Cells(
        crow=from_numbers(tensor.sparse_crow_indices or [], "int64", f"{where}.sparse_crow_indices"),
        columns=from_numbers(tensor.sparse_col_indices or [], "int64", f"{where}.sparse_col_indices"),
    )


def to_proto(array: NumberArray, cells: Cells | None = None) -> wire_pb2.Tensor:
    """Write a tensor in dense form. With `cells`, write these cells in sparse form."""
    message = wire_pb2.Tensor(dtype=cast(wire_pb2.DType, _DTYPE_CODES[array.dtype.name]), shape=array.shape)
    if cells is None:
        message.dense = array.tobytes()
    else:
        message.sparse_csr.values = cells.of(array).tobytes()
        message.sparse_csr.crow_indices = cells.crow.tobytes()
        message.sparse_csr.col_indices = cells.columns.tobytes()
    return message


def batch_to_proto(arrays: Sequence[Float32Array]) -> wire_pb2.BatchedTensor:
    """Write one float32 array per datum as concatenated bytes with byte offsets.

    All arrays must have the same trailing shape.
    """
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    return wire_pb2.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=offsets.tobytes(),
        dtype=wire_pb2.DTYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:] if arrays else (),
    )


def from_numbers(values: Sequence[float], dtype: str, where: str) -> NumberArray:
    """Convert JSON numbers to an array. Raises UserError if a number does not fit the dtype."""
    if values and isinstance(values[0], float) and dtype in ("int32", "int64"):
        return make_integers(values, dtype, where)
    try:
        array: NumberArray = np.empty(len(values), dtype)
        with np.errstate(over="ignore"):
            for start in range(0, len(values), _NUMBERS_PER_SLICE):  # other threads run between slices
                array[start : start + _NUMBERS_PER_SLICE] = values[start : start + _NUMBERS_PER_SLICE]
        return array
    except (OverflowError, ValueError, TypeError) as error:
        raise UserError(f"{where}: not all values are {dtype}: {error}") from error


def _reshape(values: NumberArray, shape: tuple[int, ...], where: str) -> NumberArray:
    if len(shape) > _MAX_DIMS or any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise UserError(f"{where}: shape {quote_value(list(shape))} does not fit {values.size} values")
    if values.size == 0 and math.prod(max(size, 1) for size in shape) > _MAX_EMPTY:
        raise UserError(f"{where}: shape {quote_value(list(shape))} is too large for an array without values")
    return values.reshape(shape)


def _make_dense(
    values: NumberArray, cells: Cells, shape: tuple[int, ...], budget: DenseBudget, where: str, fill: int = 0
) -> NumberArray:
    if len(shape) != 2 or min(shape) < 0:
        raise UserError(f"{where}: a sparse tensor has a shape of two sizes, not {quote_value(list(shape))}")

    # Check that the indices are consistent.
    rows, columns = shape
    count, crow = values.size, cells.crow
    if crow.size != rows + 1 or cells.columns.size != count:
        raise UserError(
            f"{where}: shape [{rows}, {columns}] with {crow.size} row pointers, {cells.columns.size} column indices "
            f"and {count} values"
        )
    # Compare instead of subtracting: a difference may overflow, and wrong lengths would make
    # `repeat` write out of bounds.
    if crow[0] != 0 or crow[-1] != count or (crow[1:] < crow[:-1]).any():
        raise UserError(f"{where}: row pointers must rise from 0 to {count}")
    if ((cells.columns < 0) | (cells.columns >= columns)).any():
        raise UserError(f"{where}: a column index is outside [0, {columns})")

    # Fill the dense matrix.
    budget.take(rows, columns, values.itemsize, where)
    row_of_value = np.repeat(np.arange(rows), np.diff(crow))
    _check_distinct(row_of_value * columns + cells.columns, columns, where)
    dense = np.full((rows, columns), fill, dtype=values.dtype)
    dense[row_of_value, cells.columns] = values
    return dense


def _check_distinct(cells: Int64Array, columns: int, where: str) -> None:
    """Raise UserError if a cell is listed twice, because one of its values would be lost."""
    if (cells[1:] > cells[:-1]).all():  # the usual case
        return
    ordered = np.sort(cells)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        row, column = divmod(int(twice[0]), columns)
        raise UserError(f"{where}: row {row} lists column index {column} twice")
