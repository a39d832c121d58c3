"""What the JAX backend does beside the contract's promises: micro-batches add up, and refusals name their cause."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.testing.backend_bench import drawn_examples
from skyrl_tx.testing.tiny_models import write_model

MODEL = ModelId("m")


def spec(rank: int = 4) -> ModelSpec:
    return ModelSpec(lora=LoraSpec(rank=rank, seed=1))


def batch(*shapes: tuple[int, ...], seed: int = 0) -> PreparedModelPassBatch:
    return PreparedModelPassBatch(examples=drawn_examples(MODEL, *shapes, seed=seed))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_layers=1, max_context_length=128)


@contextmanager
def running(directory: Path, **settings) -> Iterator[JaxBackend]:
    settings = {"max_lora_rank": 8, "max_lora_adapters": 1, "sample_slots": 1, **settings}
    backend = JaxBackend(str(directory), JaxConfig(compile_cache_dir=None, **settings))
    backend.start()
    backend.create_model(MODEL, spec())
    yield backend
    backend.close()


def test_micro_batches_add_up(directory):
    """The same request in one micro-batch and in many, with remat and without: only rounding differs."""
    shapes = [(20,), (30,), (9,), (31,), (64,)]
    found = []
    for settings in ({"micro_batch_tokens": 1024}, {"micro_batch_tokens": 64, "remat": True}):
        with running(directory, **settings) as backend:
            for step in range(2):  # from the second step on, gradients flow into A too
                # AdamW with a small eps would blow up the rounding of gradients near zero.
                results = backend.forward_backward(batch(*shapes, seed=step))
                metrics = backend.optim_step(MODEL, OptimizerParams(learning_rate=0.1, eps=1.0))
            found.append((metrics["unclipped_grad_l2:mean"], np.concatenate([r.logprobs for r in results])))
    (few, expected), (many, logprobs) = found
    assert many == pytest.approx(few, rel=1e-5)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_adapters_stay_float32_on_a_base_of_either_type(directory):
    """What bfloat16 would swallow is trained: weights of about 0.1, changed by a ten-thousandth of that."""
    gradients = {}
    for dtype in ("bfloat16", "float32", "auto"):  # on CPU the last is float32
        with running(directory, dtype=dtype) as backend:
            base = {leaf.dtype.name for leaf in jax.tree.leaves(backend._params)}
            assert base == {"bfloat16" if dtype == "bfloat16" else "float32"}
            before = backend.capture(MODEL, {StatePart.WEIGHTS}).weights
            backend.optim_step(MODEL, OptimizerParams(learning_rate=1e-5, weight_decay=1.0))  # decay alone
            backend.forward_backward(batch((50,), (64,)))
            held = backend.capture(MODEL, {StatePart.WEIGHTS, StatePart.GRADIENT})
            assert {np.asarray(leaf).dtype.name for leaf in jax.tree.leaves((held.weights, held.gradient))} == {
                "float32"
            }
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(held.weights), strict=True):
                np.testing.assert_allclose(new, np.asarray(old) * np.float32(1 - 1e-5), rtol=2e-7)
            gradients[dtype] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(held.gradient)])
    np.testing.assert_array_equal(gradients["auto"], gradients["float32"])
    error = np.linalg.norm(gradients["bfloat16"] - gradients["float32"]) / np.linalg.norm(gradients["float32"])
    assert 0 < error < 0.03


def test_many_targets_per_position(directory):
    """[T, K] gives each target's own log-probability, whatever K its neighbours have."""
    with running(directory, micro_batch_tokens=128) as backend:
        mixed = batch((12, 3), (12,), (20, 2), (12, 1))
        results = backend.forward_backward(mixed)
        assert [result.logprobs.shape for result in results] == [(12, 3), (12,), (20, 2), (12, 1)]
        for example, result in zip(mixed.examples, results, strict=True):
            for k in range(result.logprobs.reshape(len(example.tokens), -1).shape[1]):
                inputs = {
                    name: array.reshape(len(example.tokens), -1)[:, k] for name, array in example.loss_inputs.items()
                }
                one = PassExample(
                    request_id=RequestId("one"),
                    model_id=MODEL,
                    tokens=example.tokens,
                    loss=example.loss,
                    loss_inputs=inputs,
                    loss_config={},
                )
                [alone] = backend.forward(PreparedModelPassBatch(examples=(one,)))
                columns = result.logprobs.reshape(len(example.tokens), -1)
                np.testing.assert_allclose(columns[:, k], alone.logprobs, atol=1e-5)


def test_refusals_name_their_cause(directory, tmp_path):
    with running(directory) as backend:
        with pytest.raises(UserError, match="rank must be 1 to 8, not 9"):
            backend.create_model(ModelId("n"), spec(rank=9))
        with pytest.raises(UserError, match="'dimuon'"):
            backend.create_model(ModelId("n"), ModelSpec(lora=spec().lora, optimizer="dimuon"))
        with pytest.raises(CapacityError, match="all 1 places"):
            backend.create_model(ModelId("n"), spec())
        with pytest.raises(UserError, match="stop"):
            backend.text_of([1, 2])
        with pytest.raises(UserError, match="'gone'"):
            backend.optim_step(ModelId("gone"), OptimizerParams())
    write_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Mamba"]}')
    with pytest.raises(UserError, match="Mamba"):
        JaxBackend(str(tmp_path), JaxConfig(compile_cache_dir=None)).start()


def test_settings_are_read_without_jax():
    code = "import sys, skyrl_tx.backends.jax as room; room.BACKEND.config(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
