"""The memory plan of training: the size of micro-batches, and which layers are rematerialized.

`plan_training_memory` chooses the plan at the start. A pass that runs out of memory tries smaller
plans.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import (
    MAX_TOKENS,
    MIN_TOKENS,
    ROW_SHARE,
    SATURATING_TOKENS,
    TRAINING_SHARE,
    FreeMemory,
    count_shards,
    round_down,
)
from skyrl_tx.backends.jax.training_costs import TrainingCosts
from skyrl_tx.contract.errors import UserError
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout

DEFAULT_MICRO_BATCH_TOKENS = 1024
"""Tokens of a micro-batch on devices that do not report their memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The size of micro-batches, and when layers are rematerialized and their inputs offloaded."""

    micro_batch_tokens: int
    """Tokens on all devices together, padding included."""
    remat: bool
    """Whether layers of all micro-batches are rematerialized."""
    remat_above: int | None = None
    """Rows with more tokens per device are rematerialized even without `remat`.
    None: there are no such rows."""
    offload_above: int | None = None
    """Rows with more tokens per device have the inputs of layers in host memory.
    None: there are no such rows."""

    def get_remat_policy(self, num_tokens: int) -> RematPolicy:
        """Return the remat policy of a micro-batch with `num_tokens` on each device."""
        if self.offload_above is not None and num_tokens > self.offload_above:
            return RematPolicy.OFFLOAD
        if self.remat or (self.remat_above is not None and num_tokens > self.remat_above):
            return RematPolicy.FULL
        return RematPolicy.SAVE_MATMULS

    @property
    def longest_row_policy(self) -> RematPolicy:
        """The remat policy of the longest rows, which takes the least memory."""
        return self.get_remat_policy(1 << 62)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint entries: the choices that change the last bits of results."""
        above = {"remat_above": self.remat_above, "offload_above": self.offload_above}
        return {
            "micro_batch_tokens": str(self.micro_batch_tokens),
            "remat": str(self.remat),
            **{name: str(size) for name, size in above.items() if size is not None},
        }

    def iter_smaller(self) -> Iterator["MemoryPlan"]:
        """Yield plans to try, in this order, if the device runs out of memory with this plan.

        First with half the tokens, a quarter and so on. Then with all tokens and rematerialization,
        then with offloading.
        """
        tokens = self.micro_batch_tokens // 2
        while tokens > 0:
            yield replace(self, micro_batch_tokens=tokens)
            tokens //= 2
        if not self.remat:
            yield replace(self, remat=True)
        if self.offload_above:
            yield replace(self, remat=True, offload_above=0)


class ActiveMemoryPlan:
    """The memory plan in use. It only shrinks until the process ends."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan

    def shrink(self, plan: MemoryPlan) -> None:
        """Use a smaller plan for all later passes. Called when a pass succeeded with it.

        Keeps the plan in use if that is smaller already.
        """

        def rank(candidate: MemoryPlan) -> tuple[int, bool, int]:
            return candidate.micro_batch_tokens, not candidate.remat, candidate.offload_above or 0

        self.plan = min(self.plan, plan, key=rank)
        log.warning(
            "all passes now use %s. The next start would use the larger plan again, and results after a crash "
            "recovery would not be bit-equal. To avoid that, start the server with "
            "--backend-config.micro-batch-tokens %d --%sbackend-config.remat%s",
            self.plan,
            self.plan.micro_batch_tokens,
            "" if self.plan.remat else "no-",
            " --backend-config.offload" if self.plan.offload_above == 0 else "",
        )


def plan_training_memory(
    config: JaxConfig,
    free: FreeMemory,
    model_bytes: int,
    layout: Layout,
    costs: TrainingCosts | None,
    *,
    platform: str,
    offload_bytes: int | None = None,
) -> MemoryPlan:
    """Choose the memory plan of training, and log it. Configured values take precedence.

    The plan includes the policies of long rows, which may use the memory that one model leaves.

    Args:
        config: The settings of the backend.
        free: The memory besides weights, sampler pool and KV cache.
        model_bytes: The bytes of one model in training on each device.
        layout: The layout of training.
        costs: The costs of training; None if the devices do not report their memory.
        platform: `cpu`, `gpu` or `tpu`.
        offload_bytes: How much host memory each device may offload to. None means no limit.

    Raises UserError if `offload` is configured and `offload_bytes` is 0.
    """
    if offload_bytes == 0:
        if config.offload:
            raise UserError("--backend-config.offload: these devices cannot copy to host memory; remove this setting")
        config = config.model_copy(update={"offload": False})

    # Choose the plan.
    if costs is None:
        reason = f"the default {'on a CPU' if platform == 'cpu' else 'for a device that does not report its memory'}"
        tokens = config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
        is_remat, offload_above = bool(config.remat or config.offload), 0 if config.offload else None
        plan = MemoryPlan(tokens, is_remat, offload_above=offload_above)
    else:
        num_shards, left = count_shards(layout), free.num_bytes - model_bytes
        size = min(TRAINING_SHARE * free.num_bytes, ROW_SHARE * left)
        plan = choose_memory_plan(size, costs, config, num_shards=num_shards)
        plan = add_long_row_policies(plan, left, costs, config, num_shards=num_shards)
        cost = costs.get_bytes_per_token(plan.get_remat_policy(plan.micro_batch_tokens // num_shards))
        reason = f"{free.describe()}, a token takes {cost / 2**10:.0f} KiB"

    # Log it.
    configured = [name for name in ("micro_batch_tokens", "remat", "offload") if getattr(config, name) is not None]
    log.info(
        "micro-batches of %d tokens, %s: %s%s",
        plan.micro_batch_tokens,
        "layers rematerialized" if plan.remat else "results of matrix products kept",
        reason,
        f" ({' and '.join(configured)} configured)" if configured else "",
    )
    for above, action in ((plan.remat_above, "are rematerialized"), (plan.offload_above, "are offloaded to the host")):
        if above is not None:
            log.info("rows of more than %d tokens %s", above * layout.num_shards("tokens"), action)
    return plan


def choose_memory_plan(size: float, costs: TrainingCosts, config: JaxConfig, *, num_shards: int) -> MemoryPlan:
    """Choose rematerialization, and a micro-batch that takes at most `size` bytes on each device.

    `num_shards` is the number of devices that share the tokens of a micro-batch.
    """

    def count_tokens(remat: RematPolicy) -> int:
        fitting = costs.count_fitting_tokens(size, remat=remat)
        return min(max(1 << int(math.log2(max(fitting, 1))), MIN_TOKENS), MAX_TOKENS)

    remat = bool(config.offload or config.remat)
    if not config.offload and config.remat is None:
        remat = count_tokens(RematPolicy.SAVE_MATMULS) < SATURATING_TOKENS
    plan = MemoryPlan(config.micro_batch_tokens or 0, remat, offload_above=0 if config.offload else None)
    fitting = count_tokens(plan.get_remat_policy(SATURATING_TOKENS))
    return plan if config.micro_batch_tokens else replace(plan, micro_batch_tokens=fitting * num_shards)


def add_long_row_policies(
    plan: MemoryPlan, free: int, costs: TrainingCosts, config: JaxConfig, *, num_shards: int
) -> MemoryPlan:
    """Return the plan with remat policies for rows that are longer than a micro-batch.

    Such a row has `free` bytes on each device to itself. It gets the fastest policy that fits: no
    rematerialization, rematerialization, or offloading to the host. If the user has configured
    `remat` or `offload`, the setting applies to all rows.
    """
    micro_batch_tokens = -(-plan.micro_batch_tokens // num_shards)  # on each device

    def count_tokens(remat: RematPolicy) -> int:
        fitting = max(costs.count_fitting_tokens(ROW_SHARE * free, remat=remat), 0)
        return max(round_down(fitting), micro_batch_tokens)

    if not plan.remat and config.remat is None:
        plan = replace(plan, remat_above=count_tokens(RematPolicy.SAVE_MATMULS))
    if config.offload is None and config.remat is not False:
        plan = replace(plan, offload_above=count_tokens(RematPolicy.FULL))
    return plan


def find_longest_row(
    free: int, costs: TrainingCosts, plan: MemoryPlan, layout: Layout, offload_bytes: int | None = None
) -> int:
    """Return the length of the longest row, in tokens, for `free` bytes on each device.

    These are the bytes that are left when one model of the highest rank is in training. The row may
    take ROW_SHARE of them. `layout` is the layout of training. Each device may offload
    `offload_bytes` to host memory; None means no limit.
    """
    remat = plan.longest_row_policy
    fitting = costs.count_fitting_tokens(ROW_SHARE * free, remat=remat)
    if remat is RematPolicy.OFFLOAD and offload_bytes is not None:
        fitting = max(min(fitting, offload_bytes // costs.host_token_bytes), plan.offload_above or 0)
    return max(fitting * layout.num_shards("tokens"), plan.micro_batch_tokens // layout.num_shards("batch"))
