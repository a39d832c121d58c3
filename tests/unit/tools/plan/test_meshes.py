"""The choice of a mesh for long rows, with synthetic lengths."""

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.tools.plan.hardware import parse_devices
from skyrl_tx.tools.plan.meshes import find_fitting_candidate, list_meshes, rank_meshes
from tests.support.model_configs import QWEN3_8B

DENSE = models.find_family(QWEN3_8B).config_from_hf(QWEN3_8B)
BY_TIME = rank_meshes(DENSE, JaxConfig(), parse_devices("h200:8"), jnp.dtype("bfloat16"), list_meshes(8, with_cp=True))


def mesh_for(tokens: int, asked: list[MeshConfig]) -> MeshConfig | None:
    def longest_row(mesh: MeshConfig) -> int:
        asked.append(mesh)
        return 1000 * mesh.cp * mesh.tp // (2 if mesh.tp > 1 else 1) - mesh.dp

    found = find_fitting_candidate(BY_TIME, longest_row, tokens)
    return None if found is None else found.mesh


def test_all_meshes_of_eight_devices_are_candidates() -> None:
    found = list(list_meshes(8, with_cp=True))
    assert len(found) == len(set(found)) == 35 and all(mesh.num_devices == 8 for mesh in found)
    assert {candidate.mesh for candidate in BY_TIME} == {candidate for candidate in found if candidate.ep == 1}


def test_the_fastest_mesh_that_fits_has_the_least_cp() -> None:
    assert mesh_for(900, []) == BY_TIME[0].mesh, "the fastest"
    assert mesh_for(7999, []) == MeshConfig(cp=8)
    asked: list[MeshConfig] = []
    assert mesh_for(8001, asked) is None
    assert sorted(mesh.tp for mesh in asked) == [1, 2, 4, 8], "those with the longest rows"
    assert all(mesh.dp == mesh.fsdp == 1 for mesh in asked)


def test_fsdp_takes_what_cp_need_not() -> None:
    meshes = [candidate for candidate in BY_TIME if candidate.mesh.tp == 1]
    found = find_fitting_candidate(meshes, lambda mesh: 1000 * mesh.cp + 10 * mesh.fsdp, 2000)
    assert found is not None and found.mesh.cp == 2 and found.mesh.dp > 1, "the fastest of those that fit"
    asked: list[MeshConfig] = []

    def longest_row(mesh: MeshConfig) -> int:
        asked.append(mesh)
        return 1000 * mesh.cp + 10 * mesh.fsdp

    found = find_fitting_candidate(meshes, longest_row, 2040)
    assert found is not None and found.mesh == MeshConfig(fsdp=4, cp=2), "copies of weights leave less to rows"
    assert MeshConfig(dp=8) not in asked, "less memory than with fsdp=8"
