"""Tensors of files are copied as numpy copies them, and damaged files are refused."""

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from skyrl_tx.weights.tensor_file import TensorFile, copy_array, make_aligned

TYPES = np.float32, np.float16, ml_dtypes.bfloat16


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("wanted", TYPES)
def test_a_copy_has_the_values_of_numpy(stored, wanted) -> None:
    array = np.random.default_rng(0).standard_normal((2, 37, 1100)).astype(stored)
    for view in (array, array.swapaxes(-1, -2), array[0].T, array[..., ::2], array[0, 0]):
        into = make_aligned(list(view.shape), wanted)
        copy_array(view, into)
        np.testing.assert_array_equal(into, view.astype(wanted))
        assert into.ctypes.data % 64 == 0


def test_parts_of_all_types_are_read(tmp_path) -> None:
    tensors = {np.dtype(kind).name: np.arange(6).reshape(2, 3).astype(kind) for kind in (*TYPES, np.int32, np.uint8)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        stored = file.get_slice(name)
        assert stored.get_shape() == [2, 3]
        np.testing.assert_array_equal(stored[slice(1, 2), slice(0, 2)], tensor[1:2, 0:2])
        file.release_memory()
        np.testing.assert_array_equal(stored[slice(0, 2), slice(0, 3)], tensor)


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros(2, bool)}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    with pytest.raises(SafetensorError, match="does not contain this tensor"):
        file.get_slice("c")
    with pytest.raises(SafetensorError, match="its type BOOL is not one of F64, F32"):
        file.get_slice("b")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-1])
    with pytest.raises(SafetensorError):
        TensorFile(tmp_path / "cut.safetensors")
