"""Shared prefixes are as close to a model in float64 as plain packing is.

Legend: N examples, T positions, D hidden size, K targets per position.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.layers.lora import LoraPair
from tests.support.tiny import DENSE, tiny_directory
from tests.unit.backends.jax.test_sharing_in_training import PLAIN, SHARED, make_group, run, start_backend

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, THETA, EPSILON = 2, 4, 2, 16, 1e6, 1e-6
"""The sizes of the dense tiny model."""
Tensors = Mapping[str, Any]


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def rotate(x_TNH: jax.Array) -> jax.Array:
    angle_TH = jnp.arange(len(x_TNH))[:, None] / THETA ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    sin, cos = jnp.sin(angle_TH)[:, None], jnp.cos(angle_TH)[:, None]
    x, y = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


def compute_logprobs(tensors: Tensors, pairs: Tensors, scale: float, tokens_T: jax.Array) -> jax.Array:
    """Return log-probabilities of all tokens [T, V] by the definition of the model."""
    T = len(tokens_T)
    x_TD = tensors["model.embed_tokens.weight"][tokens_T]
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."

        def multiply(x: jax.Array, part: str, name: str, prefix: str = prefix, layer: int = layer) -> jax.Array:
            a, b = pairs[name].a[layer], pairs[name].b[layer]
            return x @ tensors[f"{prefix}{part}.{name}.weight"].T + scale * (x @ a) @ b

        # Attention
        h_TD = norm(x_TD, tensors[prefix + "input_layernorm.weight"])
        q, k, v = (
            multiply(h_TD, "self_attn", name).reshape(T, -1, HEAD_DIM) for name in ("q_proj", "k_proj", "v_proj")
        )
        q = rotate(norm(q, tensors[prefix + "self_attn.q_norm.weight"]))
        k = rotate(norm(k, tensors[prefix + "self_attn.k_norm.weight"]))
        k, v = (jnp.repeat(array, NUM_HEADS // NUM_KV_HEADS, axis=1) for array in (k, v))
        scores = jnp.einsum("tnh,unh->ntu", q, k) / np.sqrt(HEAD_DIM)
        weights = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf), axis=-1)
        x_TD += multiply(jnp.einsum("ntu,unh->tnh", weights, v).reshape(T, -1), "self_attn", "o_proj")

        # Feed-forward
        h_TD = norm(x_TD, tensors[prefix + "post_attention_layernorm.weight"])
        gated = jax.nn.silu(multiply(h_TD, "mlp", "gate_proj")) * multiply(h_TD, "mlp", "up_proj")
        x_TD += multiply(gated, "mlp", "down_proj")

    x_TD = norm(x_TD, tensors["model.norm.weight"])
    logits = x_TD @ tensors["lm_head.weight"].T + scale * (x_TD @ pairs["unembed"].a) @ pairs["unembed"].b
    return jax.nn.log_softmax(logits, axis=-1)


@jax.jit
def compute_oracle(
    tensors: Tensors, pairs: Tensors, scale: float, tokens_NT: jax.Array, targets_NTK: jax.Array, inputs: Tensors
) -> tuple[jax.Array, Tensors]:
    """Return the log-probabilities of the targets [N, T, K], and the gradient of the loss of all examples."""

    def compute_loss(pairs: Tensors) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.vmap(partial(compute_logprobs, tensors, pairs, scale))(tokens_NT)
        logprobs_NTK = jnp.take_along_axis(logprobs, targets_NTK, axis=-1)
        if "advantages" not in inputs:
            return -(logprobs_NTK * inputs["weights"]).sum(), logprobs_NTK
        ratio = jnp.exp(jnp.where(inputs["advantages"] != 0, logprobs_NTK - inputs["logprobs"], 0))
        return -(ratio * inputs["advantages"] * inputs["weights"]).sum(), logprobs_NTK

    gradient, logprobs_NTK = jax.grad(compute_loss, has_aux=True)(pairs)
    return logprobs_NTK, gradient


def stack(examples: Sequence[PassExample]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return tokens [N, T], targets [N, T, K] and the other inputs, padded with zeros."""
    length = max(example.tokens.size for example in examples)

    def pad(array: np.ndarray) -> np.ndarray:
        return np.pad(array.reshape(len(array), -1), [(0, length - len(array)), (0, 0)])

    arrays = {
        name: np.stack([pad(example.loss_inputs[name]) for example in examples]) for name in examples[0].loss_inputs
    }
    tokens = np.stack([pad(example.tokens)[:, 0] for example in examples])
    return tokens, arrays.pop("target_tokens"), {name: array.astype(np.float64) for name, array in arrays.items()}


def measure(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> np.ndarray:
    """Return the distance of each tensor from the expected one, relative to its length."""
    pairs = zip(found, expected, strict=True)
    return np.array([np.linalg.norm(x.astype(np.float64) - y) / np.linalg.norm(y) for x, y in pairs])


@pytest.mark.parametrize(("loss", "num_targets"), [("importance_sampling", None), ("cross_entropy", 3)])
def test_shared_prefixes_are_at_most_twice_as_far_from_float64_as_plain_packing(
    loss: str, num_targets: int | None
) -> None:
    draw = np.random.default_rng(11)
    groups = [(int(draw.integers(40, 90)), tuple(draw.integers(5, 40, draw.integers(2, 7)))) for _ in range(4)]

    def make(model: ModelId) -> list[PassExample]:
        made = [
            make_group(model, loss, *group, seed=seed, num_targets=num_targets) for seed, group in enumerate(groups)
        ]
        return [example for group in made for example in group]

    with start_backend() as backend:
        adapter = jax.tree.map(np.asarray, backend._pool.get(PLAIN).adapter)
        found = {model: run(backend, *make(model)) for model in (PLAIN, SHARED)}
        assert (backend.meters().shared_tokens or 0) > 0

    # The oracle
    with jax.enable_x64(True):
        tensors = load_file(tiny_directory(DENSE, 0.05) / "model.safetensors")
        pairs = {name: LoraPair(*(x.astype(np.float64) for x in (p.a, p.b))) for name, p in adapter.weights.items()}
        wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        examples = make(PLAIN)
        logprobs_NTK, gradient = compute_oracle(wide, pairs, float(adapter.scale), *stack(examples))
        expected = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
        expected_logprobs = [np.asarray(logprobs_NTK)[i, : example.tokens.size] for i, example in enumerate(examples)]
        assert expected[0].dtype == np.float64

    # Compare the gradients of each tensor, then all log-probabilities.
    plain, shared = (measure(found[model][1][model], expected) for model in (PLAIN, SHARED))
    assert plain.max() < 1e-5
    assert (shared <= 2 * plain).all(), shared / plain
    distances = {}
    for model, (results, _) in found.items():
        logprobs = [result.logprobs.reshape(len(result.logprobs), -1) for result in results]
        distances[model] = measure([np.concatenate(logprobs)], [np.concatenate(expected_logprobs)])[0]
    assert distances[PLAIN] < 1e-6 and distances[SHARED] <= 2 * distances[PLAIN]
