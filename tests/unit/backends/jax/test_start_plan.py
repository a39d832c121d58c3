"""Start plans from shapes alone, compared with figures computed by hand, and starts with them."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import memory, mesh, start_plan, training_costs
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.devices import get_compilation_monitor
from skyrl_tx.backends.jax.start_plan import make_abstract_layout, plan_start
from skyrl_tx.backends.jax.training_costs import TrainingCosts
from skyrl_tx.contract.batches import PreparedSampleBatch
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.testing.backend_driver import scoring
from tests.support.model_configs import QWEN3_8B, QWEN3_30B_A3B
from tests.support.sample_requests import make_prompt, make_request
from tests.support.tiny import TINY_CONFIG, tiny_directory

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "models" / "hub_configs"
BFLOAT16 = jnp.dtype("bfloat16")


def make_model(content: dict[str, object]) -> models.ModelConfig:
    return models.find_family(content).config_from_hf(content)


@pytest.fixture
def set_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the costs of training, which take many seconds to trace for experts and delta nets.

    test_training_costs.py tests the estimates. Tests that use this fixture test sizes that no cost enters.
    """
    mib = 2**20
    costs = TrainingCosts(
        fixed_layer_bytes=500 * mib,
        fixed_logprob_bytes=500 * mib,
        token_bytes=2 * mib,
        token_bytes_with_remat=mib,
        token_bytes_offloaded=mib // 2,
        host_token_bytes=mib // 2,
        layer_token_bytes=mib // 4,
    )
    monkeypatch.setattr(start_plan, "estimate_costs", lambda *arguments: costs)


def test_a_large_model_on_one_accelerator() -> None:
    model, config = make_model(QWEN3_8B), JaxConfig(max_lora_rank=32)
    layout = make_abstract_layout(MeshConfig())
    small, large = (
        plan_start(config, layout, model, BFLOAT16, platform="gpu", limit_bytes=limit * GIB) for limit in (60, 100)
    )
    assert small.num_parameters == 8_190_735_360, "as the model's card says: 8.2B"
    assert small.weight_bytes == 2 * small.num_parameters and small.dtype == "bfloat16"
    assert small.free_bytes == 60 * GIB - small.weight_bytes
    for plan in (small, large):
        assert plan.kv_bytes == plan.samples.num_pages * 64 * 36 * 2 * 8 * 128 * 2  # layers, k, v, heads, dims, bytes
        # Each layer: q 4096+4096, k and v 4096+1024, o 4096+4096, gate and up 4096+12288, down 12288+4096.
        params_per_rank = 36 * (2 * 8192 + 2 * 5120 + 3 * 16384) + 4096 + 151936
        assert plan.model_bytes == 4 * 4 * 32 * params_per_rank  # weights, gradient, two moments; bytes
        assert plan.pool_rank == 32 and plan.pool_bytes == plan.num_adapter_slots * 4 * 32 * params_per_rank
        assert plan.samples.max_length == 40960 and plan.max_models > 1
    assert large.samples.tokens > small.samples.tokens
    assert small.passes.remat and not large.passes.remat, "enough tokens without rematerialization"
    assert min(small.passes.micro_batch_tokens, large.passes.micro_batch_tokens) >= 4096


@pytest.mark.usefixtures("set_costs")
def test_experts_on_a_mesh() -> None:
    model, config = make_model(QWEN3_30B_A3B), JaxConfig(max_lora_rank=8)
    layout = make_abstract_layout(MeshConfig(tp=2, ep=4))
    plan = plan_start(config, layout, model, BFLOAT16, platform="gpu", limit_bytes=100 * GIB)
    assert plan.num_parameters == 30_532_122_624, "as the model's card says: 30.5B"
    experts = 48 * 128 * 3 * 2048 * 768
    maps = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512) + 2 * 151936 * 2048
    routers, norms = 48 * 128 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    assert experts + maps + routers + norms == plan.num_parameters
    assert plan.weight_bytes == 2 * (experts // 8 + maps // 2 + routers // 4 + norms)
    # Experts share the factor of dim 2048, which is whole because fsdp is 1. The factor of dim 768
    # is cut by tp.
    expert_params = 48 * (3 * 2048 + 128 // 4 * 3 * 768 // 2)
    attention_params = 48 * (2 * (2048 + 4096 // 2) + 2 * (2048 + 512 // 2))
    unembedding_params = 2048 + 151936 // 2
    assert plan.model_bytes == 4 * 4 * 8 * (expert_params + attention_params + unembedding_params)
    assert plan.samples.num_pages % 4 == 0
    assert plan.kv_bytes == plan.samples.num_pages // 4 * 64 * 48 * 2 * 4 * 128 * 2 // 2


@pytest.mark.parametrize(
    ("platform", "sizes", "dim"),
    [
        ("tpu", {"tp": 4, "ep": 2}, 256),
        pytest.param("tpu", {"ep": 8}, 0, marks=pytest.mark.slow),
        pytest.param("gpu", {"tp": 4, "ep": 2}, 0, marks=pytest.mark.slow),
    ],
)
def test_maps_of_experts_that_a_tpu_stores_in_another_order_are_copied(
    platform: str, sizes: dict[str, int], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 192 dims of gate and up instead of 768, libtpu 0.0.52 took more memory.

    On each of eight v6e it took 4.7 to 6.3 GiB more.
    """
    monkeypatch.setattr(training_costs, "_TRACED_MOE_LENGTHS", (1024, 2048))  # the masks of long rows take seconds
    layout, model = make_abstract_layout(MeshConfig(**sizes)), make_model(QWEN3_30B_A3B)
    plan = plan_start(JaxConfig(), layout, model, BFLOAT16, platform=platform, limit_bytes=32 * GIB)
    copied = 48 * 128 // sizes["ep"] * 2 * 2048 * dim * 2  # layers, experts, maps, inputs, outputs, bytes
    position_bytes = 48 * 2 * max(4 // sizes.get("tp", 1), 1) * 128 * 2  # layers, k and v, heads, dims, bytes
    row_bytes = 16 * position_bytes + (4 if platform == "tpu" else 1) * 151936 * 4  # keys of a slice, logits
    assert plan.slice_bytes == copied + plan.samples.per_shard.num_slots * row_bytes
    assert plan.pass_bytes > copied


@pytest.mark.usefixtures("set_costs")
def test_the_cache_of_linear_attention_is_pages_and_states() -> None:
    content = json.loads((CONFIGS / "Qwen3.5-9B.json").read_text())
    config = JaxConfig(max_lora_rank=8, sample_slots=16)
    plan = plan_start(
        config, make_abstract_layout(MeshConfig()), make_model(content), BFLOAT16, platform="gpu", limit_bytes=100 * GIB
    )
    position_bytes = 8 * 2 * 4 * 256 * 2  # layers, k and v, heads, dims, bytes
    # 24 layers, each with matrices in float32 and the last inputs of the convolution in bfloat16
    state_bytes = 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert plan.kv_bytes == plan.samples.num_pages * 64 * position_bytes + plan.samples.num_states * state_bytes
    assert plan.samples.state_tokens == -(-state_bytes // position_bytes) == 1572
    assert plan.samples.num_states > 1 + 16 + 4 + plan.samples.prefix_tokens // 2 // 1572, "with some for prefixes"
    assert plan.slice_bytes == 16 * (state_bytes + 16 * position_bytes + 4 * 248320)


@pytest.mark.slow
@pytest.mark.usefixtures("set_costs")
def test_a_slice_on_a_mesh_of_gpus_has_another_copy_of_its_states() -> None:
    content = json.loads((CONFIGS / "Qwen3.5-9B.json").read_text())
    config, copies = JaxConfig(max_lora_rank=8, sample_slots=16), make_abstract_layout(MeshConfig(dp=2))
    plan = plan_start(config, copies, make_model(content), BFLOAT16, platform="gpu", limit_bytes=100 * GIB)
    position_bytes = 8 * 2 * 4 * 256 * 2  # layers, k and v, heads, dims, bytes
    # 24 layers, each with matrices in float32 and the last inputs of the convolution in bfloat16
    state_bytes = 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert plan.slice_bytes == 8 * (2 * state_bytes + 16 * position_bytes + 4 * 248320)


@pytest.mark.slow
def test_the_copies_of_states_in_a_slice_count_as_the_cache() -> None:
    """With 256 samples on an H200, Nemotron 3 Nano left no memory for models.

    Its cache had 18.6 GiB, and a slice took 11.7 GiB.
    """
    content = json.loads((CONFIGS / "Nemotron-3-Nano-30B-A3B.json").read_text())
    plan = plan_start(
        JaxConfig(),
        make_abstract_layout(MeshConfig()),
        make_model(content),
        BFLOAT16,
        platform="gpu",
        limit_bytes=98 * GIB,
    )
    assert plan.samples.num_slots == 128 and plan.free_bytes is not None
    assert plan.kv_bytes + plan.slice_bytes < 0.51 * plan.free_bytes
    used = plan.weight_bytes + plan.pool_bytes + plan.kv_bytes + max(plan.slice_bytes, plan.pass_bytes)
    assert used + plan.model_bytes < 98 * GIB


@pytest.mark.parametrize(
    ("model", "platform", "limit", "configured", "slots"),
    [
        (QWEN3_8B, "gpu", 100, {}, 256),
        (QWEN3_8B, "gpu", 40, {}, 64),
        (QWEN3_8B, "gpu", 18, {}, 32),
        (QWEN3_8B, "gpu", 40, {"max_context_length": 300}, 128),
        (QWEN3_8B, "gpu", 18, {"sample_slots": 100}, 100),
        (QWEN3_8B, "cpu", None, {}, 32),
    ],
)
def test_there_are_as_many_slots_as_have_enough_tokens(
    model: dict[str, Any], platform: str, limit: int | None, configured: dict[str, int], slots: int
) -> None:
    config, layout = JaxConfig(**configured), make_abstract_layout(MeshConfig())  # type: ignore[arg-type]
    limit_bytes = None if limit is None else limit * GIB
    plan = plan_start(config, layout, make_model(model), BFLOAT16, platform=platform, limit_bytes=limit_bytes)
    assert plan.samples.num_slots == slots
    enough = slots * min(512, plan.samples.max_length)
    assert slots == 32 or "sample_slots" in configured or plan.samples.tokens >= enough


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"fsdp": 5}])
def test_a_mesh_without_devices_is_checked(sizes: dict[str, int]) -> None:
    with pytest.raises(mesh.MeshError, match="does not divide"):
        mesh.check_divisible(make_abstract_layout(MeshConfig(**sizes)), make_model(QWEN3_8B))


def use_backend(monkeypatch: pytest.MonkeyPatch, used_bytes: int) -> tuple[Capabilities, list[np.ndarray], int]:
    """Use a backend on a device that reports its memory.

    Returns its capabilities, numbers of a pass and of a sample, and how many programs were compiled.
    """

    def report_memory(devices: Iterable[Any]) -> list[Any]:
        stats = {"bytes_limit": 64 * 2**20, "bytes_in_use": used_bytes}
        return [
            SimpleNamespace(memory_stats=lambda: stats, addressable_memories=device.addressable_memories)
            if isinstance(device, jax.Device)
            else device
            for device in devices
        ]

    monkeypatch.setattr(memory, "list_local_devices", report_memory)
    compiled = get_compilation_monitor().num_compiled
    unset = dict.fromkeys(("micro_batch_tokens", "max_sample_tokens", "sample_slots", "max_lora_adapters"))
    backend = JaxBackend(str(tiny_directory()), TINY_CONFIG.model_copy(update=unset))
    capabilities = backend.start()
    backend.create_model(ModelId("m"), ModelSpec(lora=LoraSpec(rank=4, seed=1)))
    results = backend.forward_backward(scoring(ModelId("m"), [np.arange(30, dtype=np.int32)]))
    deltas = backend.sample(PreparedSampleBatch(requests=(make_request("a", make_prompt(9), max_tokens=6),)))
    backend.close()
    numbers = [result.logprobs for result in results] + [delta.logprobs for delta in deltas]
    return capabilities, numbers, get_compilation_monitor().num_compiled - compiled


@pytest.mark.slow
def test_less_free_memory_gives_the_same_bits_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, wanted, num_compiled = use_backend(monkeypatch, used_bytes=0)
    assert num_compiled > 0 and first.max_sample_tokens > 1000 and first.max_models > 1
    again, found, num_compiled = use_backend(monkeypatch, used_bytes=50 * 2**20)
    assert again == first and num_compiled == 0
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_limit_of_devices_is_their_total_memory_and_not_what_is_free() -> None:
    used = (0, 50, 10)
    devices = [SimpleNamespace(id=n, memory_stats=lambda n=n: {"bytes_limit": 64, "bytes_in_use": n}) for n in used]
    assert memory.read_memory_limit(devices) == 64


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    layout, model = make_abstract_layout(MeshConfig()), make_model(QWEN3_8B)
    plan = plan_start(JaxConfig(), layout, model, BFLOAT16, platform="gpu", limit_bytes=10 * GIB)
    with pytest.raises(UserError, match=r"take 15\.3 GiB on each device, which has 10\.0 GiB"):
        plan.check_weights_fit()
