"""JAX backend tests beyond the contract suite: micro-batches, dtypes and error messages."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions
from skyrl_tx.testing.backend_driver import drawn_examples
from skyrl_tx.testing.tiny_models import write_model
from tests.support.sample_requests import Results, make_prompt, make_request
from tests.support.tiny import tiny_backend

MODEL = ModelId("m")


def spec(rank: int = 4) -> ModelSpec:
    return ModelSpec(lora=LoraSpec(rank=rank, seed=1))


def batch(*shapes: tuple[int, ...], seed: int = 0) -> PreparedModelPassBatch:
    return PreparedModelPassBatch(examples=drawn_examples(MODEL, *shapes, seed=seed))


@contextmanager
def run_backend(**settings) -> Iterator[JaxBackend]:
    with tiny_backend(std=0.05, max_lora_adapters=1, **settings) as backend:
        backend.create_model(MODEL, spec())
        yield backend


def test_gradients_accumulate_over_micro_batches():
    """Compare one micro-batch without remat with many micro-batches with remat.

    Only rounding differs.
    """
    shapes = [(9,), (12,), (11,), (20,), (12,)]
    found = []
    for settings in ({"micro_batch_tokens": 64}, {"micro_batch_tokens": 32, "remat": True}):
        with run_backend(**settings) as backend:
            for step in range(2):  # B is zero before the first step, so A gets gradients only in the second
                # A small eps would amplify rounding errors of gradients near zero.
                results = backend.forward_backward(batch(*shapes, seed=step))
                metrics = backend.optim_step(MODEL, OptimizerParams(learning_rate=0.1, eps=1.0))
            found.append((metrics["unclipped_grad_l2:mean"], np.concatenate([r.logprobs for r in results])))
    (few, expected), (many, logprobs) = found
    assert many == pytest.approx(few, rel=1e-5)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.slow
def test_adapters_are_float32_with_any_base_dtype():
    """One step changes the weights by a factor of 1e-5, which bfloat16 would round away."""
    gradients = {}
    for dtype in ("bfloat16", "float32", "auto"):  # on CPU, auto means float32
        with run_backend(dtype=dtype) as backend:
            before = backend.capture(MODEL, {StatePart.WEIGHTS}).parts[StatePart.WEIGHTS]
            # There is no gradient yet, so only the weight decay acts.
            backend.optim_step(MODEL, OptimizerParams(learning_rate=1e-5, weight_decay=1.0))
            backend.forward_backward(batch((12,), (17,)))
            held = backend.capture(MODEL, {StatePart.WEIGHTS, StatePart.GRADIENT})

            assert {
                np.asarray(leaf).dtype.name
                for leaf in jax.tree.leaves((held.parts[StatePart.WEIGHTS], held.parts[StatePart.GRADIENT]))
            } == {"float32"}
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(held.parts[StatePart.WEIGHTS]), strict=True):
                np.testing.assert_allclose(new, np.asarray(old) * np.float32(1 - 1e-5), rtol=2e-7)

            gradients[dtype] = np.concatenate(
                [np.ravel(leaf) for leaf in jax.tree.leaves(held.parts[StatePart.GRADIENT])]
            )

    np.testing.assert_array_equal(gradients["auto"], gradients["float32"])
    error = np.linalg.norm(gradients["bfloat16"] - gradients["float32"]) / np.linalg.norm(gradients["float32"])
    assert 0 < error < 0.03


def test_several_targets_per_position():
    """Targets [T, K] give K log-probabilities per position, also if K differs by example."""
    with run_backend() as backend:
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


def test_errors_name_their_cause(tmp_path):
    with run_backend() as backend:
        with pytest.raises(CapacityError, match="all 1 adapter slots"):
            backend.create_model(ModelId("n"), spec())
        with pytest.raises(UserError, match="stop"):
            backend.text_of([1, 2])
        with pytest.raises(UserError, match="'gone'"):
            backend.optim_step(ModelId("gone"), OptimizerParams())
    write_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Mamba"]}')
    with pytest.raises(UserError, match="Mamba"):
        JaxBackend(str(tmp_path), JaxConfig(compile_cache_dir=None)).start()


def test_compile_cache_may_be_named_from_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    assert str(JaxConfig(compile_cache_dir="~/programs").compile_cache_dir) == "/home/ann/programs"  # type: ignore
    assert JaxConfig(compile_cache_dir=None).compile_cache_dir is None


def test_some_of_the_cores_compile_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(platform: str, **settings: object) -> int | None:
        return JaxConfig(**settings).with_platform_defaults(platform).compile_threads  # type: ignore[arg-type]

    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert threads("cpu") == 3 and threads("gpu") == threads("tpu") == 4
    assert threads("cpu", compile_cache_dir=None) == 0, "programs that are not kept are compiled on first use"
    assert threads("cpu", compile_threads=0) == 0 and threads("gpu", compile_threads=2) == 2
    for cores, on_cpu, on_gpu in (1, 1, 1), (2, 1, 1), (64, 4, 62):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert (threads("cpu"), threads("gpu")) == (on_cpu, on_gpu)


def test_accelerators_compile_before_they_are_ready():
    def warms_up(platform: str, **settings: object) -> bool | None:
        return JaxConfig(**settings).with_platform_defaults(platform).warmup  # type: ignore[arg-type]

    assert warms_up("gpu") and warms_up("tpu") and not warms_up("cpu")
    assert not warms_up("gpu", warmup=False) and warms_up("cpu", warmup=True)
    assert not warms_up("gpu", compile_cache_dir=None), "each start would take minutes"


def test_settings_do_not_import_jax():
    code = (
        "import sys, skyrl_tx.backends.jax as jax_backend; jax_backend.BACKEND.config(); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_rank_of_another_adapter_changes_no_bit_of_a_sample() -> None:
    """On a CPU, products with adapters have other bits if their ranks are padded further."""

    def train(backend: JaxBackend, name: str, rank: int) -> SamplerId:
        model, sampler = ModelId(name), SamplerId(name)
        backend.create_model(model, spec(rank))
        for seed in range(2):
            backend.forward_backward(PreparedModelPassBatch(examples=drawn_examples(model, (12,), seed=seed)))
            backend.optim_step(model, OptimizerParams(learning_rate=0.1))
        backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))
        return sampler

    def draw(backend: JaxBackend, *requests: SampleRequest) -> Results:
        backend.begin_sample(PreparedSampleBatch(requests=requests))
        results = Results()
        while deltas := backend.step_sample():
            results.add(deltas)
        return results

    with tiny_backend(max_lora_rank=32) as backend:
        options = PromptOptions(logprobs=True)
        mine = make_request("mine", make_prompt(20), sampler=train(backend, "low", 4), samples=3, options=options)
        base = make_request("base", make_prompt(9))
        alone = draw(backend, mine, base)
        other = make_request("other", make_prompt(9), sampler=train(backend, "high", 32), samples=2)
        together = draw(backend, other, mine, base)
        assert {key: together.bits[key] for key in alone.bits} == alone.bits
        assert draw(backend, mine, base).bits == alone.bits
