"""Metrics of how evenly tokens go to experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.train.passes import compute_expert_metrics
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.testing.backend_driver import drawn_examples
from skyrl_tx.testing.tiny_models import write_model
from tests.support.fast_jit import fast_jit
from tests.support.tiny import load_model

MODEL = ModelId("m")


def test_metrics_of_two_layers():
    """The balance is 2 tokens. In the first layer an expert has 5, and another has none."""
    first, second = np.array([[5, 0, 2, 1], [2, 2, 2, 2]]), np.array([[1, 1, 2, 4]])
    assert compute_expert_metrics([[first, second]]) == pytest.approx(
        {
            "e_frac_with_tokens:mean": (0.75 + 1 + 1) / 3,
            "e_frac_oversubscribed:mean": (0.25 + 0 + 0.25) / 3,
            "e_max_violation:mean": (1.5 + 0 + 1) / 3,
            "e_max_violation:max": 1.5,
            "e_min_violation:mean": (-1 + 0 - 0.5) / 3,
        }
    )


def test_micro_batches_are_added_before_metrics_are_computed():
    counts = np.array([[5, 0, 2, 1]]), np.array([[0, 5, 0, 3]])
    assert compute_expert_metrics([[x] for x in counts]) == compute_expert_metrics([[counts[0] + counts[1]]])


def test_a_dense_model_has_no_metrics_of_experts():
    assert compute_expert_metrics([[], []]) == {}


def test_requests_report_the_tokens_of_their_own_examples(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "Qwen3MoeForCausalLM", std=0.2, experts={"mlp_only_layers": [0]})
    tiny = load_model(directory)
    config = JaxConfig(
        compile_cache_dir=None, max_lora_adapters=2, sample_slots=1, max_sample_tokens=64, micro_batch_tokens=64
    )
    backend = JaxBackend(str(directory), config)
    backend.start()
    backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=4, seed=0)))  # B is zero, so this is the base model

    # The first request needs several micro-batches. The second runs in the same pass.
    examples = drawn_examples(MODEL, (50,), (40,), (30,), (11,))
    examples = [replace(x, request_id=RequestId("second" if i == 3 else "first")) for i, x in enumerate(examples)]
    batch = PreparedModelPassBatch(examples=tuple(examples))
    results = [backend.forward(batch), backend.forward_backward(batch)]
    assert (backend.meters().micro_batches or 0) >= 6
    backend.close()

    run = fast_jit(models.forward_and_count, static_argnames="config")
    counts = []
    for x in examples:  # padded to one length, so that one program runs
        padded, is_token = np.zeros((1, 50), np.int32), np.zeros((1, 50), np.int32)
        padded[0, : x.tokens.size], is_token[0, : x.tokens.size] = x.tokens, 1
        counts.append(run(tiny.params, tiny.config, padded, num_uses_BT=is_token)[1])
    expected = [compute_expert_metrics(counts[:3])] * 3 + [compute_expert_metrics(counts[3:])]
    for result in results:
        assert [dict(x.metrics) for x in result] == expected
