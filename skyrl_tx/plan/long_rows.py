"""The mesh for rows in training that are too long for the fastest one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.plan.meshes import Candidate


@dataclass(frozen=True, slots=True)
class LongRows:
    """Rows in training that are too long for a mesh."""

    tokens: int
    """Tokens that a row should have."""
    mesh: MeshConfig
    """The mesh that was given, or the fastest one."""
    longest: int
    """The most tokens of a row with that mesh."""
    fitting: MeshConfig | None
    """A mesh of the same devices that fits such rows; None if there is none."""


def fitting_candidate(
    by_time: Sequence[Candidate], longest_row: Callable[[MeshConfig], int], tokens: int
) -> Candidate | None:
    """Return the fastest mesh that fits rows of `tokens`, with the least `cp`; None if there is none.

    `longest_row` takes seconds. Of meshes that differ in `fsdp` and `cp` alone, that with the largest `cp` has the
    longest rows, so the others are asked for only if that one fits.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for each in by_time:
        if each.has_room:
            groups.setdefault((each.mesh.tp, each.mesh.ep), []).append(each)
    for group in groups.values():
        by_cp = sorted(group, key=lambda each: each.mesh.cp)
        if longest_row(by_cp[-1].mesh) >= tokens:
            return next(each for each in by_cp if longest_row(each.mesh) >= tokens)
    return None
