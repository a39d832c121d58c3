"""The mesh for rows in training that are too long for the fastest one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.tools.plan.meshes import Candidate


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

    `longest_row` takes seconds. Of meshes with the same `tp` and `ep`, that with the largest `cp` has the longest rows,
    and of those with the same `cp`, too, that with the largest `fsdp`. The others are asked for only if that one fits.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for each in by_time:
        if each.has_room:
            groups.setdefault((each.mesh.tp, each.mesh.ep), []).append(each)
    for group in groups.values():
        if longest_row(max(group, key=_room).mesh) < tokens:
            continue
        for cp in sorted({each.mesh.cp for each in group}):
            of_cp = [each for each in group if each.mesh.cp == cp]
            if longest_row(max(of_cp, key=_room).mesh) >= tokens:
                return next(each for each in of_cp if longest_row(each.mesh) >= tokens)
    return None


def _room(candidate: Candidate) -> tuple[int, int]:
    return candidate.mesh.cp, candidate.mesh.fsdp
