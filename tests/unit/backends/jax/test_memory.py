"""Memory plans, and the memory that programs need."""

import ctypes
import mmap
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from skyrl_tx import models
from skyrl_tx.backends.jax import memory
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.memory import MAX_MODELS, choose_max_models, get_offload_limit, get_planned_bytes
from skyrl_tx.backends.jax.memory_plan import (
    DEFAULT_MICRO_BATCH_TOKENS,
    MemoryPlan,
    add_long_row_policies,
    choose_memory_plan,
    find_longest_row,
    plan_training_memory,
)
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.shapes import SampleMemory
from skyrl_tx.backends.jax.start_plan import make_abstract_layout
from skyrl_tx.backends.jax.training_costs import TrainingCosts
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.layers.sharding import UNSHARDED
from skyrl_tx.models.config import group_blocks
from tests.support.tiny import TINY_CONFIG, get_free_memory, plan_samples, tiny_directory

MIB = 2**20
COSTS = TrainingCosts(
    fixed_layer_bytes=100 * MIB,
    fixed_logprob_bytes=0,
    token_bytes=MIB,
    token_bytes_with_remat=MIB // 8,
    token_bytes_offloaded=MIB // 32,
    host_token_bytes=MIB // 10,
    layer_token_bytes=0,
)
MODEL = ModelId("m")
SPEC = ModelSpec(lora=LoraSpec(rank=4, seed=1))
EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")


@pytest.mark.parametrize(
    ("size_mib", "settings", "expected"),
    [
        (10_000, {}, MemoryPlan(8192, remat=False)),
        (40_000, {}, MemoryPlan(16384, remat=False)),  # larger batches are not faster
        (2_000, {}, MemoryPlan(8192, remat=True)),  # 1,024 would fit without remat
        (5, {}, MemoryPlan(256, remat=True)),
        (2_000, {"remat": False}, MemoryPlan(1024, remat=False)),
        (10_000, {"micro_batch_tokens": 100}, MemoryPlan(100, remat=False)),
    ],
)
def test_the_plan_depends_on_memory_and_configured_values_take_precedence(size_mib, settings, expected):
    assert choose_memory_plan(size_mib * MIB, COSTS, JaxConfig(**settings), num_shards=1) == expected


@pytest.mark.parametrize(
    ("free_mib", "slots_mib", "settings", "expected_mib"),
    [
        (60_000, 5_000, {}, 16_484 / 0.55),
        (40_000, 5_000, {}, 16_484 / 0.55),
        (30_000, 5_000, {}, 8_292 / 0.55),  # a larger micro-batch would leave too little for the slots
        (10_000, 9_000, {}, 5_000),  # layers are rematerialized
        (100_000, 5_000, {}, 40_000),
        (100_000, 5_000, {"micro_batch_tokens": 32_668}, 32_768 / 0.55),
        (2_000, 1_000, {}, (100 + 256 / 8) / 0.9 + 1_500),  # one model and the smallest micro-batch
    ],
)
def test_the_cache_leaves_memory_for_large_micro_batches(free_mib, slots_mib, settings, expected_mib):
    found = memory._count_training_bytes(
        free_mib * MIB, slots_mib * MIB, 1_500 * MIB, COSTS, JaxConfig(**settings), UNSHARDED
    )
    assert found / MIB == pytest.approx(expected_mib)


LONG_ROWS = [
    # 0.9 * 8,900 MiB minus 100 MiB, for tokens of 1 or 1/8 MiB, rounded down to three bits
    ({}, (7168, 57344), {4096: "SAVE_MATMULS", 7168: "SAVE_MATMULS", 7169: "FULL", 57345: "OFFLOAD"}),
    ({"offload": False}, (7168, None), {7168: "SAVE_MATMULS", 57345: "FULL"}),
    ({"remat": True}, (None, 57344), {100: "FULL", 57345: "OFFLOAD"}),
    ({"remat": False}, (None, None), {57345: "SAVE_MATMULS"}),
    ({"offload": True}, (None, 0), {1: "OFFLOAD"}),
    # Rows that are no longer than a micro-batch use its policy
    ({"micro_batch_tokens": 65536}, (65536, 65536), {65536: "SAVE_MATMULS", 65537: "OFFLOAD"}),
]


@pytest.mark.parametrize(("settings", "above", "policies"), LONG_ROWS)
def test_a_long_row_has_the_first_remat_policy_with_which_it_fits(settings, above, policies):
    config = JaxConfig(**settings)
    plan = choose_memory_plan(5_000 * MIB, COSTS, config, num_shards=1)
    plan = add_long_row_policies(plan, 8_900 * MIB, COSTS, config, num_shards=1)
    assert (plan.remat_above, plan.offload_above) == above
    assert {tokens: plan.get_remat_policy(tokens).name for tokens in policies} == policies


@pytest.mark.parametrize(
    ("settings", "host_mib", "tokens"),
    [
        ({}, None, 7910 * 32),
        ({}, 10_000, 100_000),  # 0.1 MiB of host memory per token
        ({}, 1_000, 57344),  # the longest row without offloading
        ({"offload": False}, None, 7910 * 8),
    ],
)
def test_the_longest_row_takes_the_least_memory_that_settings_allow(settings, host_mib, tokens):
    config = JaxConfig(**settings)
    plan = choose_memory_plan(5_000 * MIB, COSTS, config, num_shards=1)
    plan = add_long_row_policies(plan, 8_900 * MIB, COSTS, config, num_shards=1)
    host_bytes = None if host_mib is None else host_mib * MIB
    assert find_longest_row(8_900 * MIB, COSTS, plan, UNSHARDED, host_bytes) == pytest.approx(tokens, rel=1e-3)


def test_offloading_counts_as_a_smaller_plan():
    plan = MemoryPlan(2, remat=False, remat_above=2, offload_above=10)
    assert list(plan.iter_smaller()) == [
        MemoryPlan(1, remat=False, remat_above=2, offload_above=10),
        MemoryPlan(2, remat=True, remat_above=2, offload_above=10),
        MemoryPlan(2, remat=True, remat_above=2, offload_above=0),
    ]


def plan_training(params, config, num_bytes=None, **settings) -> MemoryPlan:
    costs, layout = None if num_bytes is None else COSTS, params.layout
    free = get_free_memory(params, num_bytes)
    return plan_training_memory(config, free, 0, layout, costs, platform="cpu", **settings)


def test_devices_that_cannot_copy_to_the_host_refuse_the_setting_by_name(tiny, monkeypatch):
    monkeypatch.setattr(memory, "get_memory_limit", lambda: 4000)
    devices = [SimpleNamespace(id=number, addressable_memories=list) for number in range(2)]
    assert (get_offload_limit(devices), get_offload_limit(jax.devices()[:1])) == (0, 2000)
    with pytest.raises(UserError, match=r"--backend-config\.offload: these devices cannot copy"):
        plan_training(tiny.params, JaxConfig(offload=True), offload_bytes=0)
    assert plan_training(tiny.params, JaxConfig(), 10_000 * MIB).offload_above
    assert plan_training(tiny.params, JaxConfig(), 10_000 * MIB, offload_bytes=0).offload_above is None


def test_offloading_needs_rematerialization():
    with pytest.raises(ValidationError, match="offload: true needs remat, but remat is false"):
        JaxConfig(offload=True, remat=False)


def test_every_shard_of_the_batch_has_as_many_tokens():
    assert choose_memory_plan(10_000 * MIB, COSTS, JaxConfig(), num_shards=4) == MemoryPlan(4 * 8192, remat=False)


def test_a_device_that_does_not_report_its_memory_gets_the_default(tiny, caplog):
    with caplog.at_level("INFO"):
        assert plan_training(tiny.params, JaxConfig()) == MemoryPlan(DEFAULT_MICRO_BATCH_TOKENS, remat=False)
    assert "1024 tokens, results of matrix products kept: the default on a CPU" in caplog.text


def test_sample_memory_depends_on_memory_and_configured_values_take_precedence(tiny):
    config = tiny.config
    attention = config.blocks[0].mixer
    token = 2 * config.num_layers * attention.num_kv_heads * attention.head_dim * 4

    def plan_memory(free: int, **settings) -> SampleMemory:
        return plan_samples(tiny.params, config, JaxConfig(max_context_length=1024, **settings), free)

    # Half of 20,000 positions: 33 pages that are empty or partly filled, 97 for samples and 25 for
    # prefixes.
    assert plan_memory(20_000 * token) == plan_memory(20_100 * token) == SampleMemory(32, 6144, 1536, 512)
    assert plan_memory(10_000_000 * token) == SampleMemory(256, 256 * 1024, 64 * 1024, 512)
    assert plan_memory(10_000_000 * token, sample_slots=32) == SampleMemory(32, 32 * 1024, 8 * 1024, 512)
    copies = replace(tiny.params, layout=make_abstract_layout(MeshConfig(dp=4)))
    assert plan_samples(copies, config, JaxConfig(max_context_length=1024), 10_000_000 * token).num_slots == 4 * 256
    assert plan_memory(0).tokens == 1
    assert plan_memory(10_000 * token, max_sample_tokens=9999).tokens == 9999
    assert plan_memory(20_000 * token, prefix_cache_tokens=0) == SampleMemory(32, 7168, 0, 512)


@pytest.mark.parametrize("free_gib", [1, 7, 60, 120])
@pytest.mark.parametrize("settings", [{}, {"prefix_cache_tokens": 500}])
def test_samples_and_prompts_take_at_most_their_share(tiny, free_gib, settings):
    block = tiny.config.blocks[0]
    block = replace(block, mixer=replace(block.mixer, num_heads=32, num_kv_heads=8, head_dim=128))
    config = replace(tiny.config, groups=group_blocks([block] * 36), max_context_length=40_960)
    free = free_gib * 2**30
    planned = plan_samples(tiny.params, config, JaxConfig(**settings), free)
    token = 2 * 36 * 8 * 128 * 4
    assert planned.max_length == min(planned.tokens, 40_960) > 256
    assert 0.35 * free < planned.num_pages * planned.page * token <= 0.5 * free
    cache = models.describe_cache(tiny.params, config, planned.num_pages, planned.num_states)
    assert sum(leaf.size * 4 for leaf in jax.tree.leaves(cache)) == planned.num_pages * planned.page * token


def test_each_shard_has_its_part_of_the_memory_and_a_sample_no_more(tiny):
    attention = tiny.config.blocks[0].mixer
    token = 2 * tiny.config.num_layers * attention.num_kv_heads * attention.head_dim * 4
    params, free = replace(tiny.params, layout=make_abstract_layout(MeshConfig(fsdp=4))), 4000 * token
    planned = plan_samples(params, tiny.config, JaxConfig(sample_slots=8, max_context_length=512), free)
    assert planned.shards == 4 and planned.max_length == 512 and planned.per_shard.num_slots == 2
    assert 1200 < planned.per_shard.num_pages * planned.page <= 2000, "half of the memory of each device"
    configured = plan_samples(params, tiny.config, JaxConfig(sample_slots=8, max_sample_tokens=1024), free)
    assert configured.max_length == configured.per_shard.tokens == 256


def test_sample_memory_on_a_device_that_does_not_report_its_memory(tiny, caplog):
    with caplog.at_level("INFO"):
        assert plan_samples(tiny.params, tiny.config, JaxConfig(max_context_length=65536)).tokens == 65536
        assert plan_samples(tiny.params, tiny.config, JaxConfig(max_context_length=64)).tokens == 32 * 64
    assert "KV cache of 32 samples and 65536 tokens" in caplog.text


def test_without_reported_memory_the_plan_has_half_of_the_limit_besides_the_weights(tiny, monkeypatch, caplog):
    """Memory that is free at the start changes no plan."""
    weights = memory.count_host_weight_bytes(tiny.params)
    monkeypatch.setattr(memory, "read_available_memory", lambda: 0)
    for limit, planned in ((100 * weights, 50 * weights), (weights * 3 // 2, weights // 2), (weights, 0)):
        monkeypatch.setattr(memory, "get_memory_limit", lambda limit=limit: limit)
        assert get_planned_bytes(weights) == pytest.approx(planned, abs=1)

    monkeypatch.setattr(memory, "get_memory_limit", lambda: 4 * MIB)
    with caplog.at_level("INFO"):
        planned = plan_samples(tiny.params, tiny.config, JaxConfig())
    assert memory.CacheBytes.from_model(tiny.config, UNSHARDED, 4).count(planned) <= MIB * 1.1
    assert "the plan has 0.0 GiB besides the weights, of 0.0 GiB of memory" in caplog.text


def test_scarce_memory_is_a_warning_and_too_little_for_the_weights_an_error(tiny, monkeypatch, caplog):
    weights = memory.count_host_weight_bytes(tiny.params)
    monkeypatch.setattr(memory, "read_available_memory", lambda: weights)
    memory.check_weights_fit(weights)
    memory.warn_if_memory_is_scarce(weights)
    assert not caplog.records
    memory.warn_if_memory_is_scarce(weights + 3 * 2**30)
    assert "KV cache and models may take 3.0 GiB in time" in caplog.text

    monkeypatch.setattr(memory, "read_available_memory", lambda: weights - 1)
    with pytest.raises(UserError, match=r"--base-model: its weights take .* End other programs, or choose"):
        memory.check_weights_fit(weights)
    monkeypatch.setattr(memory, "read_available_memory", lambda: 0)
    with pytest.raises(UserError, match="its weights take"):
        JaxBackend(str(tiny_directory(std=0.05)), TINY_CONFIG).start()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the memory of pages that hold zeros")
def test_a_page_of_the_cache_takes_memory_when_it_is_first_written(tiny):
    """`mincore` tells which pages of memory a process has."""
    libc = ctypes.CDLL(None)

    def count_resident_bytes(array: jax.Array) -> int:
        first = array.unsafe_buffer_pointer() // mmap.PAGESIZE * mmap.PAGESIZE
        resident = (ctypes.c_ubyte * (array.nbytes // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(array.nbytes), resident) == 0
        return sum(byte & 1 for byte in resident) * mmap.PAGESIZE

    cache = models.make_empty_cache(tiny.params, tiny.config, 4096, 4)
    assert sum(map(count_resident_bytes, jax.tree.leaves(cache))) <= 64 * mmap.PAGESIZE
    address = cache[0].positions.k.unsafe_buffer_pointer()

    pages = np.full((1, 1, 2), (0, 7), np.int32)
    arguments = pages, np.ones(1, np.int32), np.zeros((1, 1, 2), np.int32), np.zeros(1, np.int32)
    cache = programs.copy(cache, *arguments)
    assert cache[0].positions.k.unsafe_buffer_pointer() == address, "the program writes in place"
    assert (
        sum(map(count_resident_bytes, jax.tree.leaves(cache)))
        <= 64 * 2**20
        < sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    )
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(cache))


def test_max_models_depends_on_memory_and_a_configured_value_takes_precedence(tiny, caplog):
    """All models may have the highest rank, and the old and new state of one exist together."""

    def cost(rank: int) -> int:
        return 4 * 4 * sum(leaf.size for leaf in jax.tree.leaves(models.describe_adapter(tiny.config, rank).weights))

    def choose_models(free: int | None, **settings) -> int:
        return choose_max_models(JaxConfig(**settings), tiny.config, get_free_memory(tiny.params, free))

    assert choose_models(100 * cost(64)) == choose_models(100 * cost(128), max_lora_rank=128) == 39
    assert choose_models(100 * cost(48), max_lora_rank=33) == 39  # arrays of rank 33 are padded to 48
    assert choose_models(10_000 * cost(64)) == choose_models(None) == MAX_MODELS
    assert choose_models(0) == 1
    assert choose_models(100 * cost(64), max_lora_adapters=500) == 500
    with caplog.at_level("INFO"):
        assert choose_models(100 * cost(64), max_lora_rank=32) > 60
    assert "models in training at the same time" in caplog.text and "a model of rank 32" in caplog.text
