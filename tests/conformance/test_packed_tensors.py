"""MXFP4 and FP8 tensors are unpacked with the same bits as in transformers."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tx.weights.tensor_file import Fp8Tensor, TensorFile, unpack_mxfp4
from tests.support.client_environments import TORCH


@pytest.mark.slow
def test_transformers_unpacks_the_same_numbers_of_mxfp4(client_environment, tmp_path: Path) -> None:
    """Covers every byte, and scales from subnormal numbers to the largest scale whose numbers are all finite."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (3, 40, 5, 16), np.uint8)
    scales = generator.integers(0, 252, (3, 40, 5), np.uint8)
    assert len(np.unique(blocks)) == 256
    np.savez(tmp_path / "packed.npz", blocks=blocks, scales=scales)
    client_environment(TORCH).run(Path(__file__).parent / "reference" / "mxfp4_reference.py", tmp_path)
    found = unpack_mxfp4(blocks, scales)
    np.testing.assert_array_equal(found.astype(np.float32), np.load(tmp_path / "plain.npy"))
    assert found.shape == (3, 160, 40)


@pytest.mark.slow
def test_transformers_unpacks_the_same_numbers_of_fp8(client_environment, tmp_path: Path) -> None:
    """Covers all numbers.

    The last block is as large as the other blocks, because transformers accepts no smaller blocks.
    """
    generator = np.random.default_rng(0)
    numbers = (np.arange(256 * 384) % 256).astype(np.uint8).reshape(256, 384)
    numbers[(numbers & 127) == 127] = 0  # NaN
    scales = np.exp(generator.uniform(-9, 2, (2, 3))).astype(np.float32)
    np.savez(tmp_path / "packed.npz", numbers=numbers, scales=scales)
    client_environment(TORCH).run(Path(__file__).parent / "reference" / "fp8_reference.py", tmp_path)
    tensors = {"x": numbers.view(ml_dtypes.float8_e4m3fn), "x_scale_inv": scales}
    save_file(tensors, tmp_path / "packed.safetensors")
    file = TensorFile(tmp_path / "packed.safetensors")
    found = Fp8Tensor(file.get_slice("x"), file.get_slice("x_scale_inv"))[slice(0, 256), slice(0, 384)]
    np.testing.assert_array_equal(found, np.load(tmp_path / "plain.npy"))
