"""The factors of adapters by module: of experts, stacked or one by one, and of fused modules.

Files may stack the experts of a layer, and PEFT fuses the maps that share a tensor. The server
trains each map separately.

Legend: E experts, I inputs and O outputs of a linear map, R rank.
"""

import re
from collections.abc import Mapping

import numpy as np

from skyrl_tx.contract.errors import UserError
from skyrl_tx.weights.weight_map import FUSED_MAPS, FusedModules, get_stack_names


class AdapterError(UserError):
    """The files are not an adapter that this server supports.

    The message names the file, key or tensor.
    """


Factors = tuple[np.ndarray, np.ndarray]
"""The factors A [R, I] and B [O, R] of one module.

For a stack of experts they are [E, R, I] and [E, O, R]. If all experts share a factor, its E is 1.
"""

_OUTER = {"w1": 0, "w3": 0, "w2": 1}
"""Which factor has the hidden size as a dim, A (0) or B (1), by the last part of the stack's name."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_STACK = re.compile(rf"(.+\.experts)\.({'|'.join(_OUTER)})")


def find_stack(module: str) -> tuple[str, int | None]:
    """Return the stack and the index of an expert's module.

    For any other module, return the name of the module and None.
    """
    match = _EXPERT.fullmatch(module)
    if match is None:
        return module, None
    prefix, index, leaf = match.groups()
    stacked = get_stack_names(prefix).get(leaf)
    return (module, None) if stacked is None else (f"{prefix}.{stacked}", int(index))


def is_stack(module: str) -> bool:
    """Return whether a module has the name of a stack of experts."""
    match = _STACK.fullmatch(module)
    return match is not None and match[2] in get_stack_names(match[1]).values()


def unstack(stack: str, a: np.ndarray, b: np.ndarray) -> dict[str, Factors]:
    """Return the factors of each expert by module name, as views of the factors of a stack."""
    match = _STACK.fullmatch(stack)
    assert match is not None, stack
    prefix, stacked_leaf = match.groups()
    leaves = {stacked: leaf for leaf, stacked in get_stack_names(prefix).items()}
    num_experts = max(len(a), len(b))
    all_a, all_b = (np.broadcast_to(array, (num_experts, *array.shape[1:])) for array in (a, b))
    return {f"{prefix}.{index}.{leaves[stacked_leaf]}": (all_a[index], all_b[index]) for index in range(num_experts)}


def stack_experts(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Return the factors with the experts of each layer stacked in order.

    A factor that all experts share is stored once. An expert without an adapter gets zeros.
    """
    stacked = {module: pair for module, pair in factors.items() if find_stack(module)[1] is None}
    for module, pairs in group_by_stack(factors).items():
        a, b = next(iter(pairs.values()))
        empty = np.zeros_like(a), np.zeros_like(b)
        all_pairs = [pairs.get(index, empty) for index in range(max(pairs) + 1)]
        stacks = [np.stack([pair[factor] for pair in all_pairs]) for factor in (0, 1)]
        outer = _OUTER[module.rpartition(".")[2]]
        if 1 < len(pairs) == len(all_pairs) and is_shared(module, pairs):
            stacks[outer] = stacks[outer][:1]
        stacked[module] = stacks[0], stacks[1]
    return stacked


def group_by_stack(factors: Mapping[str, Factors]) -> dict[str, dict[int, Factors]]:
    """Return the factors of experts, grouped by stack and by the index of the expert."""
    grouped: dict[str, dict[int, Factors]] = {}
    for module, pair in factors.items():
        stack, index = find_stack(module)
        if index is not None:
            grouped.setdefault(stack, {})[index] = pair
    return grouped


def is_shared(stack: str, pairs: Mapping[int, Factors]) -> bool:
    """Return whether all experts of a stack have the same factor with the hidden size."""
    outer = _OUTER[stack.rpartition(".")[2]]
    first = next(iter(pairs.values()))[outer]
    return all(np.array_equal(pair[outer], first) for pair in pairs.values())


def convert_form(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a factor of experts between one per expert and one for all, if `shape` asks for it.

    The array is returned unchanged if the conversion would change a number, or if the shapes differ
    in another way.
    """
    if array.ndim == 3 and (1, *array.shape[1:]) == shape and (array == array[:1]).all():
        return array[:1]
    return np.broadcast_to(array, shape) if array.ndim == 3 and array.shape == (1, *shape[1:]) else array


def suggest_expert_lora(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return a hint for error messages, or "".

    It names the setting for factors that all experts share, or for factors of each expert.
    """
    if len(shape) != 3 or shape[1:] != expected[1:] or 1 not in (shape[0], expected[0]):
        return ""
    theirs = "shared" if shape[0] == 1 else "own"
    return f": load it on a server with --backend-config.expert-lora {theirs}"


def fuse_modules(factors: Mapping[str, Factors], fused: FusedModules) -> dict[str, Factors]:
    """Join the factors of maps that belong to one fused module.

    The rank of the joined factors is the sum of the ranks. A has the A of each map one after
    another. B has the B of each map as a block: in the rows of the map, and in the columns of its
    A. All other elements of B are zero, for example the rows of maps that adapters do not change.
    """
    fused_factors = dict(factors)
    for leaf, parts in fused.items():
        first = next(iter(parts))
        for prefix in [module.removesuffix(first) for module in factors if module.endswith(f".{first}")]:
            pairs = [fused_factors.pop(f"{prefix}{part}") for part in parts]
            rank = pairs[0][0].shape[0]
            whole = next(iter(parts.values()))
            b_OR = np.zeros((whole.total * whole.num_heads, rank * len(parts)), np.float32)
            for index, (rows, (_, b)) in enumerate(zip(parts.values(), pairs, strict=True)):
                b_OR[rows.index, index * rank : (index + 1) * rank] = b
            fused_factors[f"{prefix}{leaf}"] = np.concatenate([a for a, _ in pairs]), b_OR
    return fused_factors


def split_modules(factors: Mapping[str, Factors], fused: FusedModules, rank: int) -> dict[str, Factors]:
    """Split the factors of fused modules into one pair of rank `rank` for each map.

    If the pair of a module has rank `rank`, all maps share its A. If it has a multiple of that rank, it
    must have one block per map, as `fuse_modules` writes it. Raises AdapterError for other pairs, and
    for pairs that change rows without an adapter.
    """
    split = dict(factors)
    for leaf in FUSED_MAPS:
        for module in [name for name in factors if name.rpartition(".")[2] == leaf]:
            a_RI, b_OR = split.pop(module)
            parts = fused.get(leaf, {})
            if any(len(b_OR) != rows.total * rows.num_heads for rows in parts.values()) or not parts:
                raise AdapterError(
                    f"adapter: module {module!r} has a factor {b_OR.shape} that does not fit the base model"
                )

            # Only rows of maps with adapters may change.
            is_unchanged = np.ones(len(b_OR), bool)
            for part_rows in parts.values():
                is_unchanged[part_rows.index] = False
            if b_OR[is_unchanged].any():
                raise AdapterError(f"adapter: module {module!r} changes rows outside {', '.join(parts)}")

            for index, (part, part_rows) in enumerate(parts.items()):
                rows, block = b_OR[part_rows.index], slice(index * rank, (index + 1) * rank)
                if len(a_RI) == rank:
                    pair = a_RI, rows
                elif np.delete(rows, np.r_[block], axis=1).any():
                    raise AdapterError(f"adapter: module {module!r} has rank {len(a_RI)}, and its maps share factors")
                else:
                    pair = a_RI[block], rows[:, block]
                split[f"{module.rpartition('.')[0]}.{part}"] = pair
    return split
