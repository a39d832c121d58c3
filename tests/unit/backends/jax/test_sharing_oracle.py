"""Shared prefixes are as close to a model in float64 as plain packing is.

Legend: N examples, T positions, D hidden size, K targets per position; in delta nets H heads, D key dim, E value dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from tests.support.tiny import DENSE, HYBRID, HYBRID_MOE, tiny_directory
from tests.unit.backends.jax.test_sharing_in_training import (
    PLAIN,
    SHARED,
    list_few_targets,
    make_group,
    run,
    start_backend,
    use_custom_loss,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, EPSILON = 4, 2, 16, 1e-6
NUM_KEY_HEADS, NUM_VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 16
"""The sizes of attention and of delta nets in the tiny models."""
Tensors = Mapping[str, Any]


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def rotate(x_TNH: jax.Array, num_dims: int, theta: float) -> jax.Array:
    angle_TH = jnp.arange(len(x_TNH))[:, None] / theta ** (jnp.arange(0, num_dims, 2) / num_dims)
    sin, cos = jnp.sin(angle_TH)[:, None], jnp.cos(angle_TH)[:, None]
    x, y, rest = jnp.split(x_TNH, (num_dims // 2, num_dims), axis=-1)
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin, rest], axis=-1)


Multiply = Callable[[jax.Array, str], jax.Array]
"""Multiplies by a matrix of a layer with its adapter."""


def attend(h_TD: jax.Array, multiply: Multiply, q_weight: jax.Array, k_weight: jax.Array, *, is_hybrid: bool) -> Any:
    """Return attention, which has a gate and rotates a quarter of each head in Qwen3.5."""
    T, (num_dims, theta) = len(h_TD), (HEAD_DIM // 4, 1e4) if is_hybrid else (HEAD_DIM, 1e6)
    q, k, v = (
        multiply(h_TD, name).reshape(T, heads, -1)
        for name, heads in (("q_proj", NUM_HEADS), ("k_proj", NUM_KV_HEADS), ("v_proj", NUM_KV_HEADS))
    )
    q, gate = jnp.split(q, (HEAD_DIM,), axis=-1)
    q, k = rotate(norm(q, q_weight), num_dims, theta), rotate(norm(k, k_weight), num_dims, theta)
    k, v = (jnp.repeat(array, NUM_HEADS // NUM_KV_HEADS, axis=1) for array in (k, v))
    scores = jnp.einsum("tnh,unh->ntu", q, k) / np.sqrt(HEAD_DIM)
    weights = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("ntu,unh->tnh", weights, v)
    return multiply((mixed * jax.nn.sigmoid(gate) if is_hybrid else mixed).reshape(T, -1), "o_proj")


def run_delta_net(h_TD: jax.Array, multiply: Multiply, tensors: Tensors, prefix: str) -> jax.Array:
    """Return the output of a gated delta net, position by position."""
    T, get = len(h_TD), lambda name: tensors[f"{prefix}linear_attn.{name}"]
    projected = jnp.concatenate([multiply(h_TD, f"in_proj_{name}") for name in "qkv"], axis=1)
    padded, kernel_IW = jnp.pad(projected, [(3, 0), (0, 0)]), get("conv1d.weight")[:, 0]
    convolved = jax.nn.silu(sum(padded[tap : tap + T] * kernel_IW[:, tap] for tap in range(4)))
    keys = NUM_KEY_HEADS * KEY_DIM

    # Queries and keys of each value head
    q, k = (x.reshape(T, NUM_KEY_HEADS, KEY_DIM) for x in (convolved[:, :keys], convolved[:, keys : 2 * keys]))
    q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, NUM_VALUE_HEADS // NUM_KEY_HEADS, axis=1) for x in (q / np.sqrt(KEY_DIM), k))
    v = convolved[:, 2 * keys :].reshape(T, NUM_VALUE_HEADS, VALUE_DIM)
    decay = jnp.exp(-jnp.exp(get("A_log")) * jax.nn.softplus(h_TD @ get("in_proj_a.weight").T + get("dt_bias")))
    beta = jax.nn.sigmoid(h_TD @ get("in_proj_b.weight").T)

    def step(state_HDE: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_HD, k_HD, v_HE, decay_H, beta_H = inputs
        state_HDE = state_HDE * decay_H[:, None, None]
        learned_HE = beta_H[:, None] * (v_HE - jnp.einsum("hde,hd->he", state_HDE, k_HD))
        state_HDE += k_HD[:, :, None] * learned_HE[:, None]
        return state_HDE, jnp.einsum("hde,hd->he", state_HDE, q_HD)

    empty = jnp.zeros((NUM_VALUE_HEADS, KEY_DIM, VALUE_DIM))
    _, mixed = jax.lax.scan(step, empty, (q, k, v, decay, beta))
    gate = jax.nn.silu(multiply(h_TD, "in_proj_z")).reshape(mixed.shape)
    return multiply((norm(mixed, get("norm.weight")) * gate).reshape(T, -1), "out_proj")


def get_matrix(tensors: Tensors, prefix: str, name: str) -> jax.Array:
    """Return a matrix of a layer, [inputs, outputs]."""
    if name in ("in_proj_q", "in_proj_k", "in_proj_v"):
        keys = NUM_KEY_HEADS * KEY_DIM
        parts = jnp.split(tensors[f"{prefix}linear_attn.in_proj_qkv.weight"], (keys, 2 * keys))
        return parts["qkv".index(name[-1])].T
    name = name.replace("shared_", "shared_expert.")
    (key,) = (key for key in tensors if key.startswith(prefix) and key.endswith(f".{name}.weight"))
    return tensors[key].T


def mix_experts(h_TD: jax.Array, multiply: Multiply, tensors: Tensors, pairs: Tensors, scale: float, layer: int) -> Any:
    """Return the outputs of the chosen experts and of the shared one. All experts are computed."""
    gates, ups, downs = (pairs[f"expert_{name}_proj"] for name in ("gate", "up", "down"))
    prefix = f"model.layers.{layer}.mlp."
    gate_EFD, up_EFD = jnp.split(tensors[prefix + "experts.gate_up_proj"], 2, axis=1)

    def apply(weight_EFD: jax.Array, pair: LoraPair) -> jax.Array:
        low_TR = h_TD @ pair.a[layer, 0]
        return jnp.einsum("td,efd->etf", h_TD, weight_EFD) + scale * jnp.einsum("tr,erf->etf", low_TR, pair.b[layer])

    hidden_ETF = jax.nn.silu(apply(gate_EFD, gates)) * apply(up_EFD, ups)
    y_ETD = jnp.einsum("etf,edf->etd", hidden_ETF, tensors[prefix + "experts.down_proj"])
    y_ETD += scale * jnp.einsum("etf,efr->etr", hidden_ETF, downs.a[layer]) @ downs.b[layer, 0]

    # The two chosen experts
    scores_TE = jax.nn.softmax(h_TD @ tensors[prefix + "gate.weight"].T, axis=-1)
    lowest_T1 = jax.lax.top_k(scores_TE, 2)[0][:, 1:]
    chosen_TE = jnp.where(scores_TE >= lowest_T1, scores_TE, 0)
    mixed_TD = jnp.einsum("ne,end->nd", chosen_TE / chosen_TE.sum(-1, keepdims=True), y_ETD)

    # The shared expert
    gated = jax.nn.silu(multiply(h_TD, "shared_gate_proj")) * multiply(h_TD, "shared_up_proj")
    weight_T1 = jax.nn.sigmoid(h_TD @ tensors[prefix + "shared_expert_gate.weight"].T)
    return mixed_TD + weight_T1 * multiply(gated, "shared_down_proj")


def compute_logprobs(tensors: Tensors, pairs: Tensors, scale: float, tokens_T: jax.Array) -> jax.Array:
    """Return log-probabilities of all tokens [T, V] by the definition of the model."""
    num_layers = sum(key.endswith("input_layernorm.weight") for key in tensors)
    is_delta = [f"model.layers.{layer}.linear_attn.A_log" in tensors for layer in range(num_layers)]
    offset = float(any(is_delta))  # the norms of Qwen3.5 are stored minus 1
    x_TD = tensors["model.embed_tokens.weight"][tokens_T]
    for layer in range(num_layers):
        prefix, number = f"model.layers.{layer}.", sum(is_delta[:layer])

        def multiply(x: jax.Array, name: str, prefix: str = prefix, layer: int = layer, number: int = number) -> Any:
            own = number if is_delta[layer] else layer - number
            index = layer if name.endswith(("gate_proj", "up_proj", "down_proj")) else own
            a, b = pairs[name].a[index], pairs[name].b[index]
            return x @ get_matrix(tensors, prefix, name) + scale * (x @ a) @ b

        # Attention or delta net
        h_TD = norm(x_TD, offset + tensors[prefix + "input_layernorm.weight"])
        if is_delta[layer]:
            x_TD += run_delta_net(h_TD, multiply, tensors, prefix)
        else:
            weights = (offset + tensors[f"{prefix}self_attn.{name}_norm.weight"] for name in "qk")
            x_TD += attend(h_TD, multiply, *weights, is_hybrid=any(is_delta))

        # Feed-forward
        h_TD = norm(x_TD, offset + tensors[prefix + "post_attention_layernorm.weight"])
        if "expert_up_proj" in pairs:
            x_TD += mix_experts(h_TD, multiply, tensors, pairs, scale, layer)
        else:
            gated = jax.nn.silu(multiply(h_TD, "gate_proj")) * multiply(h_TD, "up_proj")
            x_TD += multiply(gated, "down_proj")

    x_TD = norm(x_TD, offset + tensors["model.norm.weight"])
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
        advantages = inputs["advantages"]

        # The custom loss, gspo, or importance sampling
        if "sampled" in inputs:
            return -(jnp.exp(logprobs_NTK - inputs["sampled"]) * advantages).sum(), logprobs_NTK
        differences = jnp.where(advantages != 0, logprobs_NTK - inputs["logprobs"], 0)
        if "sequence_ratio_mask" in inputs:
            mask = inputs["sequence_ratio_mask"]
            mean_N11 = (differences * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)
            differences = jax.lax.stop_gradient(mean_N11 - logprobs_NTK) + logprobs_NTK
        ratio = jnp.exp(differences)
        clipped = jnp.clip(ratio, 0.8, 1.2) if "sequence_ratio_mask" in inputs else ratio
        return -(jnp.minimum(ratio * advantages, clipped * advantages) * inputs["weights"]).sum(), logprobs_NTK

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


@dataclass(frozen=True, slots=True)
class Case:
    """A loss, its number of targets per position, and a change of its examples."""

    loss: str
    num_targets: int | None = None
    change: Callable[[PassExample], PassExample] = lambda example: example


CASES = {
    "policy": Case("importance_sampling"),
    "soft targets": Case("cross_entropy", 3),
    "sparse targets": Case("cross_entropy", 3, list_few_targets),
    "mask": Case("gspo"),
    "custom loss": Case("cross_entropy", None, use_custom_loss),
}


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        (DENSE, "soft targets"),
        *(pytest.param(DENSE, case, marks=pytest.mark.slow) for case in CASES if case != "soft targets"),
        *(pytest.param(HYBRID, case, marks=pytest.mark.slow) for case in CASES),
        pytest.param(HYBRID_MOE, "policy", marks=pytest.mark.slow),
    ],
)
def test_shared_prefixes_are_at_most_twice_as_far_from_float64_as_plain_packing(architecture: str, case: str) -> None:
    draw = np.random.default_rng(11)
    groups = [(int(draw.integers(40, 90)), tuple(draw.integers(5, 40, draw.integers(2, 7)))) for _ in range(4)]

    chosen = CASES[case]

    def make(model: ModelId) -> list[PassExample]:
        made = [
            make_group(model, chosen.loss, *group, seed=seed, num_targets=chosen.num_targets)
            for seed, group in enumerate(groups)
        ]
        return [chosen.change(example) for group in made for example in group]

    with start_backend(architecture) as backend:
        adapter = jax.tree.map(np.asarray, backend._pool.get(PLAIN).adapter)
        found = {model: run(backend, *make(model)) for model in (PLAIN, SHARED)}
        assert (backend.meters().shared_tokens or 0) > 0

    # The oracle
    with jax.enable_x64(True):
        tensors = load_file(tiny_directory(architecture, 0.05) / "model.safetensors")
        pairs = {name: LoraPair(*(x.astype(np.float64) for x in (p.a, p.b))) for name, p in adapter.weights.items()}
        wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        examples = make(PLAIN)
        logprobs_NTK, gradient = compute_oracle(wide, pairs, float(adapter.scale), *stack(examples))
        expected = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
        expected_logprobs = [np.asarray(logprobs_NTK)[i, : example.tokens.size] for i, example in enumerate(examples)]
        assert expected[0].dtype == np.float64

    # Compare the gradients of each tensor, then all log-probabilities.
    plain, shared = (measure(found[model][1][model], expected) for model in (PLAIN, SHARED))
    print(f"gradients: {plain.max():.1e} plain, {shared.max():.1e} shared, at most {(shared / plain).max():.2f} times")
    assert plain.max() < 1e-5
    assert (shared <= 2 * plain).all(), shared / plain
    distances = {}
    for model, (results, _) in found.items():
        logprobs = [result.logprobs.reshape(len(result.logprobs), -1) for result in results]
        distances[model] = measure([np.concatenate(logprobs)], [np.concatenate(expected_logprobs)])[0]
    assert distances[PLAIN] < 1e-6 and distances[SHARED] <= 2 * distances[PLAIN]
