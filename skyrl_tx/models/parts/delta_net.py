"""Linear attention with the gated delta rule (Yang et al. 2024, arXiv:2412.06464), as a mixer.

Queries, keys and values each pass a short convolution. The output of each head is normalised and
gated.

Legend: K key heads, G value heads of each key head, D key dim, E value dim.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from skyrl_tx.layers.lora import multiply
from skyrl_tx.layers.parameter import Parameter, rms_norm
from skyrl_tx.layers.recurrent_rules import delta_rule, delta_step
from skyrl_tx.layers.stable_bits import sum_last_dim
from skyrl_tx.models.parts.base import Layer, LayerContext, ShardedSize, Target, UnsupportedModel
from skyrl_tx.models.parts.recurrent import RecurrentMixer, Rule, mask_padding

_NORM_EPSILON = 1e-6  # of queries and keys: a constant in transformers' modeling_qwen3_5.py, not in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(RecurrentMixer):
    """The gated delta net of Qwen3-Next and Qwen3.5."""

    conv_names: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    shares_prefixes: ClassVar[bool] = True
    step: ClassVar[Rule] = staticmethod(delta_step)

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_epsilon: float

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise UnsupportedModel(
                f"config.json has linear_num_value_heads = {self.num_value_heads}; it must be a multiple of "
                f"linear_num_key_heads = {self.num_key_heads}"
            )

    @override
    def targets(self) -> dict[str, Target]:
        """Return the maps.

        As on the hosted service, the maps of decays and learning rates have no adapters.
        """
        D, sizes = self.hidden_size, self._get_channels()
        inputs = {f"in_proj_{name}": size for name, size in (*sizes.items(), ("z", sizes["v"]))}
        targets = {
            name: Target(inputs=D, outputs=size, axes=("embed", "heads"), group="attn") for name, size in inputs.items()
        }
        return targets | {"out_proj": Target(inputs=sizes["v"], outputs=D, axes=("heads", "embed"), group="attn")}

    @override
    def describe(self) -> dict[str, Parameter]:
        K = self.num_key_heads
        parameters = {
            name: target.describe(num_heads=1 if name == "out_proj" else K) for name, target in self.targets().items()
        }

        # Maps without adapters are stored as in checkpoints, [out, in].
        for name in ("a", "b"):
            shape = self.num_value_heads, self.hidden_size
            parameters[f"in_proj_{name}"] = Parameter(shape, ("heads", "embed"), num_heads=K)

        for name, size in self._get_channels().items():
            parameters[f"{name}_conv"] = Parameter((size, 1, self.conv_width), ("heads", "head_dim", "head_dim"))
        for name in ("decay_log", "dt_bias"):
            parameters[name] = Parameter((self.num_value_heads,), ("heads",), "zeros", is_float32=True)
        return parameters | {"out_norm": Parameter((self.value_dim,), ("head_dim",), "ones", is_float32=True)}

    @override
    def list_sharded_sizes(self) -> Iterator[ShardedSize]:
        """Yield the number of key heads.

        A key head is not divided, nor are its value heads separated from it.
        """
        yield "heads", "linear_num_key_heads", self.num_key_heads

    @property
    @override
    def _state_shape(self) -> tuple[int, int, int, int]:
        return self.num_key_heads, self._heads_per_group, self.key_dim, self.value_dim

    @override
    def _get_channels(self) -> dict[str, int]:
        keys = self.num_key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.num_value_heads * self.value_dim}

    @override
    def _project(self, x: jax.Array, layer: Layer) -> dict[str, jax.Array]:
        return {name: layer.apply_map(x, f"in_proj_{name}") for name in (*self.conv_names, "z")}

    @override
    def _get_rule_inputs(
        self, x: jax.Array, convolved: Mapping[str, jax.Array], layer: Layer, is_token: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], None]:
        """Return queries and keys [..., K, D], values [..., K, G, E], and two rates [..., K, G].

        Queries and keys are normalised to length 1, and queries are divided by sqrt(D). The rates
        are the learning rate beta and the logarithm of the decay, float32.
        """
        q, k, v = (jax.nn.silu(convolved[name]) for name in self.conv_names)
        leading, params = x.shape[:-1], layer.params
        q, k = (_normalize(x.reshape(*leading, self.num_key_heads, self.key_dim)) for x in (q, k))
        v = v.reshape(*leading, self.num_key_heads, self._heads_per_group, self.value_dim)
        q = q * self.key_dim**-0.5

        a, b = (multiply(x, params[f"in_proj_{name}"].T) for name in ("a", "b"))
        decay = -jnp.exp(params["decay_log"]) * jax.nn.softplus(a + params["dt_bias"])
        shape = (*leading, self.num_key_heads, self._heads_per_group)
        beta, decay = jax.nn.sigmoid(b).reshape(shape), decay.reshape(shape)
        return (q, k, v, mask_padding(beta, is_token), mask_padding(decay, is_token)), None

    @override
    def _get_rule(self, context: LayerContext) -> Rule:
        return partial(delta_rule, together=context.kernels.chunks_together)

    @override
    def _project_output(self, mixed: jax.Array, skipped: jax.Array | None, z: jax.Array, layer: Layer) -> jax.Array:
        """Normalise and gate the results of the heads, [..., K, G, E], and apply the output map."""
        gate = jax.nn.silu(z).reshape(mixed.shape)
        mixed = rms_norm(mixed, layer.params["out_norm"], self.norm_epsilon) * gate
        return layer.apply_map(mixed.reshape(z.shape), "out_proj")

    @property
    def _heads_per_group(self) -> int:
        return self.num_value_heads // self.num_key_heads


def _normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(sum_last_dim(jnp.square(x))[..., None] + _NORM_EPSILON)
