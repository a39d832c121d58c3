"""The torch backend and the JAX backend compute the same numbers, and open each other's checkpoints."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, PromptOptions, SamplingParams
from skyrl_tx.models import read_model
from skyrl_tx.testing.backend_driver import STEP, BackendDriver
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights.weight_map import name_adapter_modules
from tests.support.tiny import MODEL, TINY_CONFIG
from tests.support.torch_example import torch_spec

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["untied", "tied"]
)
def drivers(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BackendDriver, BackendDriver]]:
    """Drivers of the torch and the JAX backend on the same model."""
    root: Path = tmp_path_factory.mktemp("both")
    directory = str(write_model(root / "model", std=0.3, **{**MODEL, "tied_embeddings": request.param}))
    spec = torch_spec()
    torch = spec.load()(directory, spec.config(device="cpu", num_threads=1))
    jax = JaxBackend(directory, TINY_CONFIG)

    with ExitStack() as stack:
        found: list[BackendDriver] = []
        for name, backend in (("torch", torch), ("jax", jax)):
            stack.enter_context(closing(backend))
            (root / name).mkdir()
            found.append(BackendDriver(backend, backend.start(), root / name))
        yield found[0], found[1]


def test_both_decide_by_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    """The config ties embeddings that differ, and has the context length before the scaling of the rope."""
    rope = {"rope_type": "yarn", "factor": 4.0}
    directory = write_model(tmp_path, tied_embeddings=True, rope_scaling=rope)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    spec = torch_spec()
    with closing(spec.load()(str(directory), spec.config(device="cpu", num_threads=1))) as torch:
        found, (family, config) = torch.start(), read_model(directory)
        assert found.max_context_length == config.max_context_length
        torch.create_model(ModelId("model"), ModelSpec(lora=LoraSpec(rank=2, seed=1)))
        torch.capture(ModelId("model"), ALL_PARTS).write(tmp_path)
    modules = {name.rpartition(".lora")[0] for name in load_file(tmp_path / "adapter_model.safetensors")}
    assert "base_model.model.lm_head" in modules
    names = name_adapter_modules(family.weights, tied_embeddings=config.tied_embeddings)
    assert f"base_model.model.{names['unembed']}" in modules


def move(model_id, source: BackendDriver, to: BackendDriver):
    """Restore a model of one backend from its files in another backend, and return its id there."""
    directory = source.directory / f"moved-{source.new_id()}"
    directory.mkdir()
    source.backend.capture(model_id, ALL_PARTS).write(directory)
    copy = to.new_id()
    to.backend.restore(copy, to.spec(), to.backend.open_snapshot(directory), ALL_PARTS)
    return copy


def check_equal(left, right, near: float) -> None:
    """Compare two sets of arrays, relative to each array's largest value."""
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        largest = max(float(np.abs(array).max()), 1e-6)
        np.testing.assert_allclose(array, right[name], rtol=0, atol=near * largest, err_msg=name)


def test_base_models_have_one_hash(drivers):
    assert drivers[0].capabilities.base_model_hash == drivers[1].capabilities.base_model_hash


@pytest.mark.parametrize("way", ["torch to jax", "jax to torch"])
def test_checkpoints_move_bit_by_bit(drivers, way):
    source, to = drivers if way == "torch to jax" else drivers[::-1]
    model_id = source.model(steps=2)
    source.backend.forward_backward(source.batch(source.request(model_id, seed=4)))
    copy = move(model_id, source, to)
    for part in StatePart:
        ours, theirs = source.arrays_of(model_id, part), to.arrays_of(copy, part)
        check_equal(ours, theirs, near=0)
    source.clean()
    to.clean()


def test_passes_gradients_and_steps_are_equal(drivers):
    torch, jax = drivers
    model_id = torch.model(steps=1)
    copy = move(model_id, torch, jax)

    for loss in LOSS_SPECS:
        results = []
        for driver, driver_model in ((torch, model_id), (jax, copy)):
            [request] = [driver.request(driver_model, (7, 12, 20), seed=5, loss=loss)]
            results.append(driver.backend.forward_backward(driver.batch(request)))

        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
            assert ours.sums["loss"] == pytest.approx(theirs.sums["loss"], rel=1e-4, abs=1e-3)
            assert ours.means.keys() == theirs.means.keys()
            for name, term in ours.means.items():
                assert term.count == theirs.means[name].count
                assert term.total == pytest.approx(theirs.means[name].total, rel=1e-4, abs=1e-3), (loss, name)
        gradient = torch.arrays_of(model_id, StatePart.GRADIENT)
        check_equal(gradient, jax.arrays_of(copy, StatePart.GRADIENT), near=1e-4)

        metrics = [
            driver.backend.optim_step(driver_model, STEP) for driver, driver_model in ((torch, model_id), (jax, copy))
        ]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
        jax.backend.delete_model(copy)  # AdamW amplifies rounding, so each loss begins with equal weights
        copy = move(model_id, torch, jax)

    torch.clean()
    jax.clean()


def test_greedy_samples_and_prompt_scores_are_equal(drivers):
    torch, jax = drivers
    model_id = torch.model(steps=2)
    copy = move(model_id, torch, jax)
    params = SamplingParams(seed=1, max_tokens=24, temperature=0.0, eos_stops=False)
    found = []

    for driver, driver_model in ((torch, model_id), (jax, copy)):
        request = driver.sample_request(
            driver.sampler(driver_model), params=params, options=PromptOptions(logprobs=True, topk=3, sample_topk=3)
        )
        driver.backend.begin_sample(PreparedSampleBatch(requests=(request,)))
        deltas = []
        while new := driver.backend.step_sample():
            deltas += new
        found.append(deltas)

    tokens, logprobs = (
        [np.concatenate([getattr(d, key) for d in deltas]) for deltas in found] for key in ("tokens", "logprobs")
    )
    np.testing.assert_array_equal(*tokens)
    np.testing.assert_allclose(*logprobs, rtol=0, atol=1e-4)

    prompts = [next(delta.prompt for delta in deltas if delta.prompt is not None) for deltas in found]
    np.testing.assert_allclose(*(prompt.logprobs for prompt in prompts), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(*(prompt.topk.token_ids for prompt in prompts))
    torch.clean()
    jax.clean()
