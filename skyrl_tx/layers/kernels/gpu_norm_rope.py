"""RMS norm and rotary embedding of heads on NVIDIA GPUs: one Pallas kernel (for Triton) each way.

XLA computes both with their gradient in six kernels for queries and six for keys. The kernels among
them that reduce over halves of heads reach a third of the memory bandwidth. Here each head is read
once and written once.

Legend: M rows (of all sequences), N heads, H head dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MAX_ROWS, MAX_HEADS = 16, 4
"""The maximum rows and heads of a program, which share the angles that it has read.

The numbers in use divide the numbers of rows and heads.
"""


def normalize_and_rotate(
    x: jax.Array, weight_H: jax.Array, cosine: jax.Array, sine: jax.Array, *, epsilon: float, interpret: bool
) -> jax.Array:
    """Return heads [..., N, H] scaled to unit mean square, times the weight, and rotated, like `x`.

    Computes in float32, with angles [..., H / 2] as in `layers.rope.rotate`. The result has the
    type of `x`. Weight and angles are constants.
    """
    *leading, num_heads, dim = x.shape
    rows = math.prod(leading)
    angles = (jnp.broadcast_to(angle, (*leading, dim // 2)).reshape(rows, dim // 2) for angle in (cosine, sine))
    out: jax.Array = _normalize_and_rotate(epsilon, interpret, x.reshape(rows, num_heads, dim), weight_H[None], *angles)
    return out.reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize_and_rotate(epsilon: float, interpret: bool, x: jax.Array, *constants: jax.Array) -> jax.Array:
    return _run_kernel(partial(_forward_kernel, epsilon=epsilon), "rotate_normed", interpret, (x,), constants)


def _forward(epsilon: float, interpret: bool, x: jax.Array, *constants: jax.Array) -> tuple[jax.Array, Any]:
    return _normalize_and_rotate(epsilon, interpret, x, *constants), (x, constants)


def _backward(epsilon: float, interpret: bool, kept: Any, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    x, constants = kept
    kernel = partial(_backward_kernel, epsilon=epsilon)
    return _run_kernel(kernel, "d_rotate_normed", interpret, (x, d_out), constants), None, None, None


_normalize_and_rotate.defvjp(_forward, _backward)


def _run_kernel(kernel: Any, name: str, interpret: bool, heads: tuple[jax.Array, ...], constants: Any) -> jax.Array:
    """Run a kernel that reads and writes blocks of heads [M, N, H]."""
    x = heads[0]
    M, N, H = x.shape
    rows, num_heads = math.gcd(M, MAX_ROWS), math.gcd(N, MAX_HEADS)
    block = pl.BlockSpec((rows, num_heads, H), lambda row, head: (row, head, 0))
    weight = pl.BlockSpec((1, H), lambda row, head: (0, 0))
    angles = pl.BlockSpec((rows, H // 2), lambda row, head: (row, 0))

    out: Any = pl.pallas_call(
        kernel,
        grid=(M // rows, N // num_heads),
        in_specs=[*[block] * len(heads), weight, angles, angles],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*heads, *constants)
    return out


def _forward_kernel(x_ref: Any, weight_ref: Any, cosine_ref: Any, sine_ref: Any, out_ref: Any, *, epsilon: float):
    cosine, sine, weights = cosine_ref[...], sine_ref[...], _load_halves(weight_ref)
    for number in range(x_ref.shape[1]):
        head = jnp.int32(number)
        halves = _load_halves(x_ref, head)
        scale = _compute_scale(halves, epsilon)
        first, second = (half * scale * weight for half, weight in zip(halves, weights, strict=True))
        _write(out_ref, head, first * cosine - second * sine, second * cosine + first * sine)


def _backward_kernel(
    x_ref: Any, d_out_ref: Any, weight_ref: Any, cosine_ref: Any, sine_ref: Any, d_x_ref: Any, *, epsilon: float
):
    cosine, sine, weights = cosine_ref[...], sine_ref[...], _load_halves(weight_ref)
    for number in range(x_ref.shape[1]):
        head = jnp.int32(number)
        halves, (d_first, d_second) = _load_halves(x_ref, head), _load_halves(d_out_ref, head)
        scale = _compute_scale(halves, epsilon)
        d_turned = d_first * cosine + d_second * sine, d_second * cosine - d_first * sine
        d_normed = [d_half * weight for d_half, weight in zip(d_turned, weights, strict=True)]
        normed = [half * scale for half in halves]
        inner = sum(jnp.sum(d * n, axis=1, keepdims=True) for d, n in zip(d_normed, normed, strict=True))
        mean = inner / x_ref.shape[2]
        _write(d_x_ref, head, *((d - n * mean) * scale for d, n in zip(d_normed, normed, strict=True)))


def _load_halves(ref: Any, *head: Any) -> list[jax.Array]:
    """Return both halves of the dims of a block, for one of its heads: float32 [rows, H / 2]."""
    size = ref.shape[-1] // 2
    spans = (pl.ds(start, size) for start in (0, size))
    return [plgpu.load(ref.at[(slice(None), *head, span)]).astype(jnp.float32) for span in spans]


def _compute_scale(halves: list[jax.Array], epsilon: float) -> jax.Array:
    total = sum(jnp.sum(half * half, axis=1, keepdims=True) for half in halves)
    return jax.lax.rsqrt(total / (2 * halves[0].shape[1]) + epsilon)


def _write(ref: Any, head: Any, *halves: jax.Array) -> None:
    size = halves[0].shape[1]
    for index, half in enumerate(halves):
        plgpu.store(ref.at[(slice(None), head, pl.ds(index * size, size))], half.astype(ref.dtype))
