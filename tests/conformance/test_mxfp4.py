"""Tensors in MXFP4 are unpacked as by transformers, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.weights.mxfp4 import unpack
from tests.support.client_environments import TORCH


@pytest.mark.slow
def test_transformers_unpacks_the_same_numbers(client_environment, tmp_path: Path) -> None:
    """Covers every byte, and scales from subnormal numbers to the largest whose numbers are all finite."""
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (3, 40, 5, 16), np.uint8)
    scales = generator.integers(0, 252, (3, 40, 5), np.uint8)
    assert len(np.unique(blocks)) == 256
    np.savez(tmp_path / "packed.npz", blocks=blocks, scales=scales)
    client_environment(TORCH).run(Path(__file__).parent / "reference" / "mxfp4_reference.py", tmp_path)
    found = unpack(blocks, scales)
    np.testing.assert_array_equal(found.astype(np.float32), np.load(tmp_path / "plain.npy"))
    assert found.shape == (3, 160, 40)
