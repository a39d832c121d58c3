"""Unpack tensors in MXFP4 as transformers does, in the torch environment.

    python mxfp4_reference.py DIRECTORY

Reads `packed.npz` with `blocks` and `scales`, and writes `plain.npy`, float32.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def main(directory: Path) -> None:
    packed = np.load(directory / "packed.npz")
    plain = convert_moe_packed_tensors(torch.tensor(packed["blocks"]), torch.tensor(packed["scales"]))
    np.save(directory / "plain.npy", plain.to(torch.float32).numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
