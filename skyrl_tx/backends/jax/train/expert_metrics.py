"""Metrics of how evenly the tokens of a request went to the experts of each layer.

Names and definitions are those in the documentation of `ForwardBackwardOutput.metrics` in the SDK.
"""

from collections.abc import Sequence

import numpy as np

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.results import Metrics


def compute_expert_metrics(micro_batches: Sequence[Sequence[NumberArray]]) -> Metrics:
    """Return the metrics of a request, or none if its model has no experts.

    Each micro-batch has the counts [layers, E] of each stack of layers: how many tokens each expert
    received. They are integers and are summed first, so the metrics do not depend on the number of
    micro-batches or on their order.
    """
    # One row of metrics per layer. With perfect balance, each expert of a layer has the same count.
    rows: list[NumberArray] = []
    for stack in zip(*micro_batches, strict=True):
        count_LE = np.sum(stack, axis=0, dtype=np.int64)
        balance_L1 = count_LE.mean(axis=1, keepdims=True)
        violation_LE = count_LE / balance_L1 - 1
        has_tokens_L, is_over_L = (count_LE > 0).mean(axis=1), (count_LE > balance_L1).mean(axis=1)
        rows.append(np.stack([has_tokens_L, is_over_L, violation_LE.max(axis=1), violation_LE.min(axis=1)], axis=1))
    if not rows:
        return {}

    # Average over the layers of all stacks.
    metrics_L4 = np.concatenate(rows)
    with_tokens, oversubscribed, max_violation, min_violation = map(float, metrics_L4.mean(axis=0))
    return {
        "e_frac_with_tokens:mean": with_tokens,
        "e_frac_oversubscribed:mean": oversubscribed,
        "e_max_violation:mean": max_violation,
        "e_max_violation:max": float(metrics_L4[:, 2].max()),
        "e_min_violation:mean": min_violation,
    }
