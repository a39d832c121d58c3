"""Multiply-adds of a token, compared with figures computed by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_tx.models import ModelConfig, find_family
from skyrl_tx.models.flops import (
    count_adapter_macs,
    count_expert_parameters,
    count_frozen_macs,
    count_mixing_macs,
    estimate_experts_read,
)
from tests.support.model_configs import QWEN3_8B, QWEN3_30B_A3B


def make_model(content: dict[str, object]) -> ModelConfig:
    return find_family(content).config_from_hf(content)


def hub_model(name: str) -> ModelConfig:
    return make_model(json.loads((Path(__file__).parent / "hub_configs" / f"{name}.json").read_text()))


def test_a_dense_model() -> None:
    model = make_model(QWEN3_8B)
    layer_macs = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    assert count_frozen_macs(model) == 36 * layer_macs + 4096 * 151936 == 7_568_097_280
    layer_macs = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288)
    assert count_adapter_macs(model, 8) == 8 * (36 * layer_macs + 4096 + 151936)
    assert count_mixing_macs(model, 3) == 36 * 2 * 32 * 128 * (1 + 2 + 3)
    assert count_expert_parameters(model) == 0 and estimate_experts_read(model, 1) == 1


def test_a_mixture_counts_the_chosen_experts() -> None:
    model = make_model(QWEN3_30B_A3B)
    attention, expert, router = 2 * 2048 * 4096 + 2 * 2048 * 512, 3 * 2048 * 768, 2048 * 128
    assert count_frozen_macs(model) == 48 * (attention + 8 * expert + router) + 2048 * 151936
    assert count_frozen_macs(model) == pytest.approx(3.0e9, rel=0.02), "3.3 billion with the embeddings, says its card"
    assert count_expert_parameters(model) == 48 * 128 * expert
    assert estimate_experts_read(model, 1) == pytest.approx(8 / 128)
    assert estimate_experts_read(model, 10_000) == pytest.approx(1)
    own, shared = (count_adapter_macs(replace(model, expert_lora=form), 1) for form in ("own", "shared"))
    assert own - shared == 48 * 7 * 3 * 2048, "seven of eight experts have no factor next to the hidden size"


def test_latents_are_mapped_to_keys_and_values() -> None:
    model = hub_model("Moonlight-16B-A3B")
    attention = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 16 * (128 + 128) * 512 + 16 * 128 * 2048
    dense, expert, router = 3 * 2048 * 11264, 3 * 2048 * 1408, 2048 * 64
    mixture_macs = 26 * ((6 + 2) * expert + router)  # six of 64 experts and two shared experts
    assert count_frozen_macs(model) == 27 * attention + dense + mixture_macs + 2048 * 163840
    assert count_mixing_macs(model, 3) == 27 * 16 * (128 + 64 + 128) * (1 + 2 + 3)


def test_windows_bound_what_positions_read() -> None:
    layers = 32
    model = hub_model("Mistral-7B-v0.1")
    macs_per_pair = layers * 2 * 32 * 128
    assert count_mixing_macs(model, 4096) == macs_per_pair * 4096 * 4097 // 2
    assert count_mixing_macs(model, 5000) - count_mixing_macs(model, 4999) == macs_per_pair * 4096


def test_the_delta_rule_takes_the_same_for_each_position() -> None:
    state_macs = 24 * 3 * 32 * 128 * 128  # layers, products, value heads, key dim, value dim
    macs_per_pair = 8 * 2 * 16 * 256  # every fourth layer has softmax attention
    assert count_mixing_macs(hub_model("Qwen3.5-9B"), 100) == 100 * state_macs + macs_per_pair * 100 * 101 // 2


def test_layers_of_one_part_count_that_part() -> None:
    model = hub_model("Nemotron-3-Super-120B-A12B")
    mamba = 4096 * (2 * 8192 + 2 * 8 * 128 + 128) + 8192 * 4096
    attention = 2 * 4096 * 32 * 128 + 2 * 4096 * 2 * 128
    latents, expert, shared, router = 2 * 4096 * 1024, 2 * 1024 * 2688, 2 * 4096 * 5376, 4096 * 512
    all_layer_macs = 40 * mamba + 8 * attention + 40 * (latents + 22 * expert + shared + router)
    assert count_frozen_macs(model) == all_layer_macs + 4096 * 131072
    assert count_expert_parameters(model) == 40 * 512 * expert
    state_macs, macs_per_pair = 40 * 2 * 128 * 64 * 128, 8 * 2 * 32 * 128  # layers, products, heads, dims
    assert count_mixing_macs(model, 100) == 100 * state_macs + macs_per_pair * 100 * 101 // 2
