"""Unpack tensors in FP8 blocks as transformers does, in the torch environment.

    python fp8_reference.py DIRECTORY

Reads `packed.npz` with the bytes of `numbers` and `scales`, and writes `plain.npy`, float32.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


def main(directory: Path) -> None:
    packed = np.load(directory / "packed.npz")
    numbers = torch.tensor(packed["numbers"]).view(torch.float8_e4m3fn)
    plain = Fp8Dequantize(None)._dequantize_one(numbers, torch.tensor(packed["scales"]), torch.float32)
    np.save(directory / "plain.npy", plain.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
