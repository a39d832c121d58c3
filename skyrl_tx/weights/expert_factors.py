"""The factors of experts in adapter files.

Each map of an expert is a module of its own (`….mlp.experts.7.gate_proj`), or the experts of a layer are stacked
(`….mlp.experts.w1`). All experts of a layer may share the factor that lies next to the hidden size.

Legend: E experts, I inputs and O outputs of a linear map, R rank.
"""

import re
from collections.abc import Mapping

import numpy as np

from skyrl_tx.weights.weight_map import get_stack_names

Factors = tuple[np.ndarray, np.ndarray]
"""A [R, I] and B [O, R] of one module; of a stack [E, R, I] and [E, O, R], where E is 1 of a factor that all share."""

_OUTER = {"w1": 0, "w3": 0, "w2": 1}
"""Which factor, A or B, lies next to the hidden size, by the last part of the stack's name."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_OUTER)})")


def find_stack(module: str) -> tuple[str, int | None]:
    """Return the stack that holds the module of an expert, and its index; other modules are returned with None."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module, None
    prefix, index, leaf = match.groups()
    stacked = get_stack_names(prefix).get(leaf)
    return (module, None) if stacked is None else (f"{prefix}.{stacked}", int(index))


def is_stack(module: str) -> bool:
    """Return whether a module is named as a stack of experts."""
    match = _STACK.fullmatch(module)
    return match is not None and match[2] in get_stack_names(match[1]).values()


def unstack(stack: str, a: np.ndarray, b: np.ndarray) -> dict[str, Factors]:
    """Return the factors of each expert by its module, views of those of a stack."""
    match = _STACK.fullmatch(stack)
    assert match is not None, stack
    prefix, leaf = match.groups()
    leaf_of = {stacked: name for name, stacked in get_stack_names(prefix).items()}
    num_experts = max(len(a), len(b))
    each_a, each_b = (np.broadcast_to(array, (num_experts, *array.shape[1:])) for array in (a, b))
    return {f"{prefix}.{index}.{leaf_of[leaf]}": (each_a[index], each_b[index]) for index in range(num_experts)}


def stack_experts(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Return the factors with the experts of each layer stacked in order.

    A factor that all share is there once, and an expert without an update gets zeros.
    """
    found = {module: pair for module, pair in factors.items() if find_stack(module)[1] is None}
    for module, pairs in group_by_stack(factors).items():
        a, b = next(iter(pairs.values()))
        empty = np.zeros_like(a), np.zeros_like(b)
        all_pairs = [pairs.get(index, empty) for index in range(max(pairs) + 1)]
        stacks = [np.stack([pair[factor] for pair in all_pairs]) for factor in (0, 1)]
        outer = _OUTER[module.rpartition(".")[2]]
        if 1 < len(pairs) == len(all_pairs) and is_shared(module, pairs):
            stacks[outer] = stacks[outer][:1]
        found[module] = stacks[0], stacks[1]
    return found


def group_by_stack(factors: Mapping[str, Factors]) -> dict[str, dict[int, Factors]]:
    """Return the factors of experts by their stacks and by their number."""
    found: dict[str, dict[int, Factors]] = {}
    for module, pair in factors.items():
        stack, index = find_stack(module)
        if index is not None:
            found.setdefault(stack, {})[index] = pair
    return found


def is_shared(stack: str, pairs: Mapping[int, Factors]) -> bool:
    """Return whether all experts of a stack have the same factor next to the hidden size."""
    outer = _OUTER[stack.rpartition(".")[2]]
    first = next(iter(pairs.values()))[outer]
    return all(np.array_equal(pair[outer], first) for pair in pairs.values())


def convert_form(found: np.ndarray, wanted: tuple[int, ...]) -> np.ndarray:
    """Return factors of experts as one for all, or as one each, as wanted and where that changes no number."""
    if found.ndim == 3 and (1, *found.shape[1:]) == wanted and (found == found[:1]).all():
        return found[:1]
    return np.broadcast_to(found, wanted) if found.ndim == 3 and found.shape == (1, *wanted[1:]) else found


def suggest_expert_lora(found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return which server takes factors of experts that are of the other form."""
    if len(found) != 3 or found[1:] != wanted[1:] or 1 not in (found[0], wanted[0]):
        return ""
    theirs = "shared" if found[0] == 1 else "own"
    return f": load it on a server with --backend-config.expert-lora {theirs}"
