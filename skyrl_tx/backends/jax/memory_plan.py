"""The memory plan of training: the size of micro-batches, and which layers are rematerialized.

`memory` chooses the plan at the start. A pass that runs out of memory tries smaller plans.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from skyrl_tx.layers.remat import RematPolicy

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
