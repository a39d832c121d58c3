"""The router of a mixture of experts: which experts a token goes to, and their shares in its output.

Legend: M tokens, D embed, E experts, K experts of a token, G groups of experts.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from skyrl_tx.layers.lora import multiply
from skyrl_tx.layers.remat import mark_matmul
from skyrl_tx.layers.stable_bits import apply_batch_invariant, sum_last_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The settings of a router."""

    num_experts: int
    num_chosen: int  # of each token
    renormalizes: bool  # whether the weights of the chosen sum to 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # of equally many neighbouring experts
    num_chosen_groups: int = 1  # of each token: those whose two best experts have the highest sum of scores
    factor: float = 1.0  # of the weights


def route(
    x_MD: jax.Array,
    router_ED: jax.Array,
    routing: Routing,
    bias_E: jax.Array | None = None,
    correction_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the share and the number of each chosen expert, [M, K], the first choice first.

    The correction is added to scores for the choice alone (Wang et al. 2024, arXiv:2408.15664); shares lack it.
    """
    score_ME = mark_matmul(multiply(x_MD, router_ED.T))
    if bias_E is not None:
        score_ME += bias_E.astype(jnp.float32)
    share_ME = (
        apply_batch_invariant(jax.nn.softmax, score_ME) if routing.scores == "softmax" else jax.nn.sigmoid(score_ME)
    )
    if correction_E is None and routing.num_groups == 1:
        share_MK, expert_MK = jax.lax.top_k(share_ME, routing.num_chosen)
    else:
        choice_ME = jax.lax.stop_gradient(share_ME if correction_E is None else share_ME + correction_E)
        _, expert_MK = jax.lax.top_k(_mask_other_groups(choice_ME, routing), routing.num_chosen)
        share_MK = jnp.take_along_axis(share_ME, expert_MK, axis=-1)
    if routing.renormalizes:
        share_MK = share_MK / sum_last_dim(share_MK)[..., None]
    return share_MK if routing.factor == 1 else share_MK * routing.factor, expert_MK


def _mask_other_groups(score_ME: jax.Array, routing: Routing) -> jax.Array:
    """Return the scores, with those of experts outside a token's groups at minus infinity."""
    if routing.num_groups == 1:
        return score_ME
    score_MGE = score_ME.reshape(score_ME.shape[0], routing.num_groups, -1)
    best_MG2, _ = jax.lax.top_k(score_MGE, 2)
    _, group_MK = jax.lax.top_k(best_MG2.sum(axis=-1), routing.num_chosen_groups)
    is_chosen_MG = (group_MK[:, :, None] == jnp.arange(routing.num_groups)).any(axis=1)
    return jnp.where(is_chosen_MG[:, :, None], score_MGE, -jnp.inf).reshape(score_ME.shape)
