"""The weights of each layer as separate arrays that share the memory of a stacked array.

The weights of equal layers are stored as one array [layers, ...], called a stack. XLA on GPU has no
matrix product that reads a slice in place: in every decode step it copies the weights of each layer
out of the stack. A program whose arguments are the layers copies nothing.
JAX has no views of arrays, but it accepts arrays of other libraries without a copy, through DLPack
(https://dmlc.github.io/dlpack/latest/c_api.html). This module exports a stack through DLPack once
per layer, with a shifted start and one dim less.
"""

import ctypes
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models import DecoderParams
from skyrl_tx.models.config import split_stacks

_ALIGNMENT = 256
"""Views must be aligned to this many bytes, like XLA's own arrays.

A layer is copied if its size in bytes is not a multiple of this number. Only small layers have such
sizes.
"""


def should_separate_layers(platform: str, layout: Layout) -> bool:
    """Return whether programs copy less with separate layers.

    If weights are sharded along "embed", gathering them before use is a copy anyway. Separate layers
    also run without a loop (see `models.decoder`). XLA would then gather the weights of multiple
    layers ahead, which takes memory.
    """
    return platform == "gpu" and layout.num_shards("embed") == 1


def separate_layers(params: DecoderParams) -> DecoderParams:
    """Return the parameters with a separate array, or `jax.ShapeDtypeStruct`, for each layer.

    The stacks must not be changed. They stay in memory as long as any of their layers.
    """
    return split_stacks(params, _split_stack)


def _split_stack(stack: jax.Array | jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    """Return the layers of a stack, which must not be sharded along its first dim."""
    assert stack.sharding is not None
    sharding, shape = _get_layer_sharding(stack.sharding), stack.shape[1:]
    if isinstance(stack, jax.ShapeDtypeStruct):
        return (jax.ShapeDtypeStruct(shape, stack.dtype, sharding=sharding),) * stack.shape[0]
    shards = [shard.data for shard in stack.addressable_shards]
    return tuple(
        jax.make_array_from_single_device_arrays(shape, sharding, [_make_view(shard, layer) for shard in shards])
        for layer in range(stack.shape[0])
    )


def _get_layer_sharding(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = tuple(sharding.spec)
    assert not axes or axes[0] is None, "layers are not sharded"
    return NamedSharding(sharding.mesh, PartitionSpec(*axes[1:]))


def _make_view(stack: jax.Array, layer: int) -> jax.Array:
    num_bytes = stack.nbytes // stack.shape[0]
    return stack[layer] if num_bytes % _ALIGNMENT else jax.dlpack.from_dlpack(_LayerView(stack, layer, num_bytes))


class _DLTensor(ctypes.Structure):
    """`DLTensor` of DLPack, the first member of a `DLManagedTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),  # of int64
        ("strides", ctypes.c_void_p),  # of int64, or null
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _LayerView:
    """One layer of a stack on one device, as an array of another library."""

    def __init__(self, stack: jax.Array, layer: int, num_bytes: int) -> None:
        self._stack, self._first_byte = stack, layer * num_bytes

    def __dlpack_device__(self) -> Any:
        return self._stack.__dlpack_device__()  # type: ignore[attr-defined]

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """Return the capsule of the stack, narrowed to the layer. It keeps the stack in memory."""
        capsule = self._stack.__dlpack__(stream=stream)  # type: ignore[call-arg]
        tensor = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
        tensor.byte_offset += self._first_byte
        tensor.ndim -= 1
        tensor.shape += ctypes.sizeof(ctypes.c_int64)
        if tensor.strides:
            tensor.strides += ctypes.sizeof(ctypes.c_int64)
        return capsule
