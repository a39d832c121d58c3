"""Bounds and the choice of a mesh, compared with figures computed by hand."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.models.flops import count_exchanged_elements
from skyrl_tx.tools.plan.hardware import parse_devices
from skyrl_tx.tools.plan.roofline import (
    Workload,
    compute_decoding_bound,
    compute_training_bound,
    find_fitting_candidate,
    list_meshes,
    rank_meshes,
)
from tests.support.model_configs import QWEN3_8B, QWEN3_30B_A3B

CONFIGS = Path(__file__).parents[2] / "models" / "hub_configs"
BFLOAT16 = jnp.dtype("bfloat16")
FROZEN, PARAMETERS = 7_568_097_280, 8_190_735_360
WORK = Workload(
    micro_batch_tokens=4096,
    sequence_tokens=1024,
    is_remat=True,
    rank=8,
    num_slots=32,
    sample_tokens=1024,
    num_parameters=PARAMETERS,
    itemsize=2,
    adapter_bytes=0,
    cache_bytes=0,
)
DENSE = models.find_family(QWEN3_8B).config_from_hf(QWEN3_8B)
MIXTURE = models.find_family(QWEN3_30B_A3B).config_from_hf(QWEN3_30B_A3B)
EIGHT = tuple(list_meshes(8, with_cp=False))
BY_TIME = rank_meshes(DENSE, JaxConfig(), parse_devices("h200:8"), BFLOAT16, list_meshes(8, with_cp=True))


def test_training_of_a_dense_model() -> None:
    size = {"adapter_bytes": 10**9}
    bound = compute_training_bound(DENSE, parse_devices("h200:1"), MeshConfig(), replace(WORK, **size))
    lora = 8 * (36 * (2 * 8192 + 2 * 5120 + 3 * 16384) + 4096 + 151936)
    mixing = 36 * 2 * 32 * 128 * 1025 / 2  # on average, a position of 1,024 reads 512.5 positions
    assert bound.arithmetic_s == pytest.approx(2 * 4096 * (3 * FROZEN + 4 * (lora + mixing)) / 989.5e12)
    assert bound.memory_s == pytest.approx(3 * 2 * (PARAMETERS - 151936 * 4096) / 4.8e12)
    assert bound.links_s == 0 and bound.bottleneck == "arithmetic"
    assert bound.tokens_per_s == pytest.approx(4096 / bound.arithmetic_s)
    kept = compute_training_bound(DENSE, parse_devices("h200:1"), MeshConfig(), replace(WORK, is_remat=False, **size))
    assert kept.arithmetic_s == pytest.approx(2 * 4096 * (2 * FROZEN + 3 * (lora + mixing)) / 989.5e12)


def test_decoding_of_a_dense_model_reads_weights_and_cache() -> None:
    cache = 32 * 1024 * 36 * 2 * 8 * 128 * 2
    size = {"cache_bytes": cache}
    bound = compute_decoding_bound(DENSE, parse_devices("h200:1"), MeshConfig(), replace(WORK, **size))
    assert bound.bottleneck == "memory"
    assert bound.memory_s == pytest.approx((2 * (PARAMETERS - 151936 * 4096) + cache) / 4.8e12)
    position = 36 * 2 * 32 * 128 * 1024
    assert bound.arithmetic_s == pytest.approx(2 * 32 * (FROZEN + position) / 989.5e12)


def test_decoding_of_a_mixture_reads_the_experts_that_are_met() -> None:
    experts, rest = 48 * 128 * 3 * 2048 * 768, 30_532_122_624 - 48 * 128 * 3 * 2048 * 768 - 151936 * 2048
    size = {"num_parameters": 30_532_122_624}
    met = 1 - (120 / 128) ** 32
    whole = compute_decoding_bound(MIXTURE, parse_devices("h200:1"), MeshConfig(), replace(WORK, **size))
    assert whole.memory_s == pytest.approx(2 * (rest + met * experts) / 4.8e12)
    cut = compute_decoding_bound(MIXTURE, parse_devices("h200:8"), MeshConfig(tp=2, ep=4), replace(WORK, **size))
    assert cut.memory_s == pytest.approx(2 * (rest / 2 + met * experts / 8) / 4.8e12)


def test_devices_send_weights_over_fsdp_and_outputs_over_tp() -> None:
    devices, size = parse_devices("h200:4"), {"adapter_bytes": 10**9}
    weights, gradient = 2 * (PARAMETERS - 151936 * 4096), 10**9
    over_dp = compute_training_bound(DENSE, devices, MeshConfig(dp=4), replace(WORK, **size))
    assert over_dp.links_s == pytest.approx(2 * gradient * 3 / 4 / 450e9)
    over_fsdp = compute_training_bound(DENSE, devices, MeshConfig(fsdp=4), replace(WORK, **size))
    assert over_fsdp.links_s == pytest.approx((3 * weights + 2 * gradient) * 3 / 4 / 450e9)
    over_tp = compute_training_bound(DENSE, devices, MeshConfig(tp=4), replace(WORK, **size))
    assert over_tp.links_s == pytest.approx(3 * 36 * 2 * 2 * 3 / 4 * 4096 * 4096 * 4 / 450e9)
    assert over_dp.arithmetic_s == over_fsdp.arithmetic_s == over_tp.arithmetic_s
    assert over_dp.memory_s == over_fsdp.memory_s == 4 * over_tp.memory_s
    assert over_fsdp.s_per_token == pytest.approx((over_fsdp.arithmetic_s + over_fsdp.links_s) / 4096)


def test_devices_of_cp_exchange_heads_for_tokens() -> None:
    devices = parse_devices("h200:8")
    weights, rows = 2 * (PARAMETERS - 151936 * 4096), 4096 / 8
    over_cp = compute_training_bound(DENSE, devices, MeshConfig(cp=8), WORK)
    heads = 36 * 2 * (32 + 8) * 128  # queries and outputs, keys and values
    assert over_cp.links_s == pytest.approx(3 * 7 / 8 * (weights + rows * heads * 2) / 450e9)
    over_both = compute_training_bound(DENSE, devices, MeshConfig(tp=2, cp=4), WORK)
    sums = 36 * 2 * 2 / 2 * 4096 / 4 * 4096 * 4
    exchanged = 3 / 4 * (weights / 2 + 4096 / 4 * heads / 2 * 2)
    assert over_both.links_s == pytest.approx(3 * (sums + exchanged) / 450e9)


@pytest.mark.parametrize(
    ("numbers", "num_parts"),
    [(48 * 2 * (32 + 4) * 128, 4), (48 * 2 * (32 + 8) * 128, 8)],  # eight devices hold copies of four KV heads
)
def test_more_devices_than_kv_heads_exchange_copies(numbers: int, num_parts: int) -> None:
    assert count_exchanged_elements(MIXTURE, num_parts) == numbers


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_published_models_have_a_mesh(name: str) -> None:
    content = json.loads((CONFIGS / f"{name}.json").read_text())
    model = models.find_family(content).config_from_hf(content)
    found = rank_meshes(model, JaxConfig(), parse_devices("h200:8"), BFLOAT16, EIGHT)
    assert found and all(candidate.mesh.num_devices == 8 for candidate in found)
    assert count_exchanged_elements(model, 4) > 0
    assert [candidate.has_fitting_weights for candidate in found] == sorted(
        (candidate.has_fitting_weights for candidate in found), reverse=True
    )
    roomy = [candidate.seconds_per_token for candidate in found if candidate.has_fitting_weights]
    assert roomy == sorted(roomy)


def test_samples_on_devices_of_dp_share_no_work() -> None:
    one = compute_decoding_bound(DENSE, parse_devices("h200:1"), MeshConfig(), WORK)
    four = compute_decoding_bound(DENSE, parse_devices("h200:4"), MeshConfig(dp=4), replace(WORK, num_slots=128))
    assert four.links_s == 0 and four.memory_s == one.memory_s and four.arithmetic_s == one.arithmetic_s


@pytest.mark.parametrize(
    ("device", "mesh", "why"),
    [
        ("v5e:2x4", MeshConfig(tp=8), "copies of the weights leave no memory to samples"),
        ("h200:8", MeshConfig(dp=8), "each device has room for all weights and many samples"),
        ("l40s:8", MeshConfig(dp=4, tp=2), "the links are slow"),
    ],
)
def test_the_best_mesh_of_a_dense_model(device: str, mesh: MeshConfig, why: str) -> None:
    devices = parse_devices(device)
    found = rank_meshes(DENSE, JaxConfig(), devices, BFLOAT16, list_meshes(devices.number, with_cp=False))
    assert found[0].mesh == mesh, why


def test_experts_are_cut_once() -> None:
    meshes = [
        candidate.mesh for candidate in rank_meshes(MIXTURE, JaxConfig(), parse_devices("h200:8"), BFLOAT16, EIGHT)
    ]
    assert MeshConfig(tp=8) not in meshes, "8 does not divide 4 key heads"


# Meshes for long rows, with synthetic lengths


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
