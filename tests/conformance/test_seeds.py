"""A seed determines the output: alone, in a batch with other requests, and after a restart of the backend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, PromptOptions, SamplingParams
from skyrl_tx.testing.tiny_models import write_model

NUM_PROMPTS, NUM_SAMPLES, NEW = 240, 2, 20
SLOTS = 16
ADAPTER = SamplerId("adapter")
pytestmark = pytest.mark.slow

Samples = dict[tuple[RequestId, int], tuple[list[int], np.ndarray]]


def start(model: Path, *, slots: int = SLOTS, dtype: str = "float32") -> JaxBackend:
    config = JaxConfig(
        compile_cache_dir=None,
        dtype=dtype,
        max_lora_rank=4,
        max_sampler_adapters=1,
        sample_slots=slots,
        max_sample_tokens=slots * 128,
        max_topk_logprobs=0,
    )

    backend = JaxBackend(str(model), config)
    backend.start()
    return backend


MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen3.5": {
        "architecture": "Qwen3_5ForCausalLM",
        "keys": {"layer_types": ["linear_attention", "full_attention"]},
    },
    "Gemma3": {"architecture": "Gemma3ForCausalLM"},
}
"""Each model has two layers, because rounding differences grow with the depth."""


@pytest.fixture(
    scope="module",
    params=["Qwen3", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("Qwen3.5", "Gemma3"))],
)
def files(request, tmp_path_factory) -> tuple[Path, Path]:
    """Write a model, and an adapter whose B is not zero."""
    model = write_model(tmp_path_factory.mktemp("model"), std=0.2, **MODELS[request.param])
    directory = tmp_path_factory.mktemp("adapter")
    backend = start(model)
    backend.create_model(ModelId("m"), ModelSpec(lora=LoraSpec(rank=4, seed=1)))
    snapshot = backend.capture(ModelId("m"), {StatePart.WEIGHTS})
    snapshot.write(directory)
    backend.close()
    randomize_b(directory / "adapter_model.safetensors")
    return model, directory


def randomize_b(file: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors, draw = load_file(file), np.random.default_rng(0)
    save_file(
        {
            name: 0.1 * draw.standard_normal(tensor.shape).astype(np.float32) if ".lora_B." in name else tensor
            for name, tensor in tensors.items()
        },
        file,
    )


def open_backend(files: tuple[Path, Path], **options) -> JaxBackend:
    model, adapter = files
    backend = start(model, **options)
    backend.load_sampler(ADAPTER, backend.open_snapshot(adapter))
    return backend


def make_requests() -> list[SampleRequest]:
    """Return requests with different first tokens and many lengths.

    Every second request uses the adapter.
    """
    draw = np.random.default_rng(7)
    return [
        SampleRequest(
            request_id=RequestId(f"r{number}"),
            sampler=ADAPTER if number % 2 else None,
            prompt=np.append(number, draw.integers(2, 256, draw.integers(2, 30))).astype(np.int32),
            num_samples=NUM_SAMPLES,
            params=SamplingParams(seed=number % 50, max_tokens=NEW, eos_stops=False, temperature=0.9),
            options=PromptOptions(),
        )
        for number in range(NUM_PROMPTS)
    ]


def sample(backend: JaxBackend, *batches: Sequence[SampleRequest]) -> Samples:
    """Sample the batches one after another."""
    tokens: dict[tuple[RequestId, int], list[int]] = {}
    logprobs: dict[tuple[RequestId, int], list[float]] = {}
    for batch in batches:
        backend.begin_sample(PreparedSampleBatch(requests=tuple(batch)))
        while deltas := backend.step_sample():
            for delta in deltas:
                assert delta.error is None
                tokens.setdefault((delta.request_id, delta.index), []).extend(delta.tokens.tolist())
                logprobs.setdefault((delta.request_id, delta.index), []).extend(delta.logprobs.tolist())
    return {where: (tokens[where], np.array(logprobs[where], np.float32)) for where in tokens}


@pytest.fixture(scope="module")
def alone(files) -> Samples:
    backend = open_backend(files)
    drawn = sample(backend, *[[request] for request in make_requests()])
    backend.close()
    assert len(drawn) == NUM_PROMPTS * NUM_SAMPLES
    return drawn


def difference(some: Samples, others: Samples) -> tuple[float, float]:
    """Return the share of differing tokens (one per sample) and the largest logprob difference before them."""
    flips, compared, largest = 0, 0, 0.0
    for where, (tokens, logprobs) in some.items():
        same = np.equal(tokens, others[where][0])
        until = NEW if same.all() else int(same.argmin())
        flips += until < NEW
        compared += min(until + 1, NEW)
        if until:
            largest = max(largest, float(np.abs(logprobs[:until] - others[where][1][:until]).max()))
    return flips / compared, largest


def test_samples_of_a_request_differ(alone):
    for request in make_requests():
        assert alone[request.request_id, 0][0] != alone[request.request_id, 1][0]


def test_samples_are_bit_equal_after_a_restart(files, alone):
    backend = open_backend(files)
    again = sample(backend, *[[request] for request in make_requests()])
    backend.close()
    for where, (tokens, logprobs) in again.items():
        assert tokens == alone[where][0] and logprobs.tobytes() == alone[where][1].tobytes()


def test_batching_changes_no_bit(files, alone):
    """All requests fit the shortest read length, so one program decodes them."""
    backend, requests = open_backend(files), make_requests()
    together = sample(backend, requests)
    reversed_order = sample(backend, requests[::-1])
    backend.close()
    for got in (together, reversed_order):
        assert difference(alone, got) == (0.0, 0.0)


@pytest.mark.parametrize("slots", [4, 32])
def test_other_slot_counts_differ_only_by_rounding(files, alone, slots):
    backend = open_backend(files, slots=slots)
    flips, largest = difference(alone, sample(backend, make_requests()))
    backend.close()
    assert flips < 1e-3 and largest < 1e-5


def test_bfloat16_tokens_rarely_depend_on_the_slot_count(files):
    """Compares samples of equal weights at two slot counts."""
    results = []
    for slots in (SLOTS, 32):
        backend = open_backend(files, slots=slots, dtype="bfloat16")
        results.append(sample(backend, make_requests()))
        backend.close()
    flips, largest = difference(*results)
    assert flips < 0.01 and largest < 0.2
