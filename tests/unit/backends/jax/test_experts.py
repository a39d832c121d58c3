"""Tests of MoE models in the JAX backend: rematerialization, adapters without MLP layers, and the largest rank."""

from pathlib import Path

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.models.parts.feed_forward import EXPERT_PREFIX
from skyrl_tx.testing.backend_driver import drawn_examples
from skyrl_tx.testing.tiny_models import write_model

MODEL, RESTORED = ModelId("m"), ModelId("restored")
MAX_RANK = 48  # larger than the width of an expert


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with one dense and one sparse layer."""
    experts = {"mlp_only_layers": [0]}
    return write_model(tmp_path_factory.mktemp("model"), "Qwen3MoeForCausalLM", std=0.2, experts=experts)


def start(directory: Path, *, remat: bool = False) -> JaxBackend:
    config = JaxConfig(
        compile_cache_dir=None,
        remat=remat,
        max_lora_rank=MAX_RANK,
        max_lora_adapters=2,
        micro_batch_tokens=64,
        sample_slots=1,
        max_sample_tokens=64,
    )
    backend = JaxBackend(str(directory), config)
    backend.start()
    return backend


def batch(model_id: ModelId, seed: int) -> PreparedModelPassBatch:
    return PreparedModelPassBatch(examples=drawn_examples(model_id, (30,), (19,), (11,), seed=seed))


def train(backend: JaxBackend, lora: LoraSpec) -> None:
    """Take one optimizer step, so that the LoRA factors B are no longer zero. Then compute another gradient.

    No optimizer step applies this second gradient.
    """
    backend.create_model(MODEL, ModelSpec(lora=lora))
    backend.forward_backward(batch(MODEL, 0))
    backend.optim_step(MODEL, OptimizerParams(learning_rate=0.01, eps=1.0))
    backend.forward_backward(batch(MODEL, 1))


@pytest.mark.slow
def test_remat_gives_the_same_gradient(directory: Path) -> None:
    gradients = []
    for remat in (False, True):
        backend = start(directory, remat=remat)
        train(backend, LoraSpec(rank=4, seed=1))
        gradients.append(backend.capture(MODEL, ALL_PARTS).parts[StatePart.GRADIENT])
        backend.close()
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *gradients)


@pytest.mark.slow
def test_without_train_mlp_adapters_of_dense_and_expert_layers_stay_zero(directory: Path) -> None:
    backend = start(directory)
    train(backend, LoraSpec(rank=4, seed=1, train_mlp=False))
    snapshot = backend.capture(MODEL, ALL_PARTS)
    for name, pair in snapshot.parts[StatePart.WEIGHTS].items():
        is_mlp = name.startswith(EXPERT_PREFIX) or name in ("gate_proj", "up_proj", "down_proj")
        for part in (
            pair.a,
            pair.b,
            snapshot.parts[StatePart.GRADIENT][name].a,
            snapshot.parts[StatePart.GRADIENT][name].b,
        ):
            assert bool(np.any(part)) != is_mlp, name
    backend.close()


@pytest.mark.slow
def test_the_largest_rank_trains_and_is_restored_bit_equal(directory: Path, tmp_path: Path) -> None:
    backend = start(directory)
    lora = LoraSpec(rank=MAX_RANK, seed=1)
    train(backend, lora)
    backend.capture(MODEL, ALL_PARTS).write(tmp_path)
    backend.restore(RESTORED, ModelSpec(lora=lora), backend.open_snapshot(tmp_path), ALL_PARTS)
    stepped = [backend.optim_step(model_id, OptimizerParams(learning_rate=0.01)) for model_id in (MODEL, RESTORED)]
    assert stepped[0] == stepped[1] and stepped[0]["unclipped_grad_l2:mean"] > 0

    results = [backend.forward_backward(batch(model_id, 2)) for model_id in (MODEL, RESTORED)]
    for original, restored in zip(*results, strict=True):
        np.testing.assert_array_equal(original.logprobs, restored.logprobs)
        assert np.isfinite(original.logprobs).all()

    original, restored = (backend.capture(model_id, ALL_PARTS) for model_id in (MODEL, RESTORED))
    assert set(original.parts) == ALL_PARTS
    jax.tree.map(np.testing.assert_array_equal, original.parts, restored.parts)
    backend.close()
