"""Tensors that checkpoints store packed, in several tensors each; they are read by their plain names, part by part."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_tx.weights.mxfp4 import PackedTensor
from skyrl_tx.weights.scaled import Fp8Tensor, Int4Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """A way to store a tensor: what the names of its parts end in, of which the first has the numbers."""

    suffixes: tuple[str, ...]
    unpack: Callable[..., Any]
    """Returns a slice of the plain tensor, given those of the parts."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the parts of a tensor."""
        return tuple(name + suffix for suffix in self.suffixes)


PACKINGS = (
    Packing(("_blocks", "_scales"), PackedTensor),  # MXFP4
    Packing(("", "_scale_inv"), Fp8Tensor),
    Packing(("_packed", "_scale", "_shape"), Int4Tensor),
)


def packing_of(name: str, stored: Collection[str]) -> Packing | None:
    """Return how a tensor is packed, by its plain name and the names of all stored tensors; None if it is not."""
    return next((each for each in PACKINGS if all(part in stored for part in each.parts(name))), None)


def plain_names(files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the file of each tensor by its plain name; that of a packed one has its numbers."""
    plain = dict(files)
    for packing in PACKINGS:
        own = packing.suffixes[1]
        for name in [each.removesuffix(own) for each in files if each.endswith(own)]:
            if packing_of(name, files) is packing:
                for part in packing.parts(name):
                    plain.pop(part)
                plain[name] = files[packing.parts(name)[0]]
    return plain
