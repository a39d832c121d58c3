"""Logprobs of sampled tokens equal the logprobs of `forward`, for every family, with the base model and adapters.

Adapters have two ranks. Prompt lengths are near multiples of the prefill bucket (32), the attention
block (64) and the KV read length (128), and need one, two and three prefill chunks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.models import FAMILIES
from skyrl_tx.testing.backend_driver import scoring
from skyrl_tx.testing.tiny_models import LLAMA3_ROPE, write_model

VOCAB_SIZE = 256
LEARNING_RATE = 0.02
NEW = 24  # tokens of a sample: two decode slices
LENGTHS = (64, 65, 130)  # each has its own bucket, and so its own program
WITH_PROMPT_LOGPROBS = 65  # length of the prompts whose logprobs are requested
RANKS = {"base": None, "low": 2, "high": 8}
VARIANTS = {
    "LlamaForCausalLM": {"tied_embeddings": False, "rope_scaling": LLAMA3_ROPE},
    "Qwen2ForCausalLM": {"head_dim": 8, "tied_embeddings": False},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {"experts": {"mlp_only_layers": [1]}},
    "MistralForCausalLM": {"keys": {"sliding_window": 20}},
    "GptOssForCausalLM": {"num_layers": 3},
    "Qwen3_5ForCausalLM": {"num_layers": 4},
    "Qwen3_5MoeForCausalLM": {"num_layers": 4},
    "Qwen3NextForCausalLM": {"num_layers": 4},
    "DeepseekV3ForCausalLM": {"num_layers": 3},
    "Glm4MoeForCausalLM": {"num_layers": 3},
    "Glm4MoeLiteForCausalLM": {"num_layers": 3},
    "NemotronHForCausalLM": {},
    "Gemma3ForCausalLM": {"num_layers": 3, "keys": {"sliding_window": 20}},
}


def test_all_families_are_covered():
    assert set(VARIANTS) == {family.architecture for family in FAMILIES.values()}


OWN_FACTORS = ("Qwen3MoeForCausalLM", "GptOssForCausalLM")
"""Families that also run with separate LoRA factors for each expert."""

IN_CI = (("Qwen3ForCausalLM", "shared"), ("Qwen3MoeForCausalLM", "own"))
"""The cases that CI runs: a dense model, and experts with separate LoRA factors.

The contract suite compares trainer and sampler for states, and the tests of the model runner for an
untied unembedding.
"""


def case(architecture: str, form: str) -> Any:
    is_needed = (architecture, form) in IN_CI
    return pytest.param(
        (architecture, form), id=f"{architecture}-{form}", marks=() if is_needed else pytest.mark.exhaustive
    )


CASES = [*((name, "shared") for name in VARIANTS), *((name, "own") for name in OWN_FACTORS)]


@pytest.fixture(scope="module", params=[case(*parameters) for parameters in CASES])
def backend(request, tmp_path_factory) -> Iterator[JaxBackend]:
    """A backend with a trained model of each rank and an untrained one."""
    architecture, form = request.param
    directory = write_model(tmp_path_factory.mktemp("model"), architecture, std=0.15, **VARIANTS[architecture])

    config = JaxConfig(
        compile_cache_dir=None,
        expert_lora=form,
        dtype="float32",
        max_lora_rank=max(filter(None, RANKS.values())),
        max_sampler_adapters=2,
        micro_batch_tokens=1024,
        sample_slots=16,
        max_sample_tokens=16 * 384,
        prefill_tokens=128,
        prefill_chunk_tokens=64,
    )

    backend = JaxBackend(str(directory), config)
    backend.start()
    tokens = np.random.default_rng(0).integers(2, VOCAB_SIZE, 41).astype(np.int32)

    for name, rank in RANKS.items():
        backend.create_model(ModelId(name), ModelSpec(lora=LoraSpec(rank=rank or 2, seed=rank or 0)))
        if rank is not None:
            for _ in range(2):
                backend.forward_backward(scoring(ModelId(name), [tokens]))
                backend.optim_step(ModelId(name), OptimizerParams(learning_rate=LEARNING_RATE))
            backend.load_sampler(SamplerId(name), backend.capture(ModelId(name), {StatePart.WEIGHTS}))
    yield backend
    backend.close()


def make_request(name: str, number: int, length: int) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(f"{name}.{number}"),
        sampler=None if RANKS[name] is None else SamplerId(name),
        prompt=np.random.default_rng([number, *name.encode()]).integers(2, VOCAB_SIZE, length).astype(np.int32),
        num_samples=2,
        params=SamplingParams(seed=number, max_tokens=NEW, eos_stops=False),
        options=PromptOptions(logprobs=length == WITH_PROMPT_LOGPROBS),
    )


def sample(backend: JaxBackend, requests: list[SampleRequest]) -> dict[tuple[RequestId, int], tuple[np.ndarray, ...]]:
    """Sample all requests in one batch.

    Returns for each sample the tokens of prompt and sample, and the reported logprobs of the last
    tokens.
    """
    backend.begin_sample(PreparedSampleBatch(requests=tuple(requests)))
    prompts: dict[RequestId, np.ndarray] = {}
    tokens: dict[tuple[RequestId, int], list[np.ndarray]] = {}
    logprobs: dict[tuple[RequestId, int], list[np.ndarray]] = {}

    while deltas := backend.step_sample():
        for delta in deltas:
            assert delta.error is None
            if delta.prompt is not None and delta.prompt.logprobs is not None:
                prompts[delta.request_id] = delta.prompt.logprobs[1:]
            tokens.setdefault((delta.request_id, delta.index), []).append(delta.tokens)
            logprobs.setdefault((delta.request_id, delta.index), []).append(delta.logprobs)

    prompt_tokens = {request.request_id: request.prompt for request in requests}
    return {
        where: (
            np.concatenate([prompt_tokens[where[0]], *tokens[where]]),
            np.concatenate([prompts.get(where[0], np.zeros(0, np.float32)), *logprobs[where]]),
        )
        for where in tokens
    }


def largest_difference(backend: JaxBackend, requests: list[SampleRequest]) -> float:
    drawn = sample(backend, requests)
    assert len(drawn) == 2 * len(requests)
    largest = 0.0
    for name in RANKS:
        own = [pair for (request_id, _), pair in drawn.items() if request_id.startswith(f"{name}.")]
        scored = backend.forward(scoring(ModelId(name), [row for row, _ in own]))
        for (row, logprobs), result in zip(own, scored, strict=True):
            assert logprobs.size == (row.size - 1 if row.size == WITH_PROMPT_LOGPROBS + NEW else NEW)
            largest = max(largest, float(np.abs(logprobs - result.logprobs[-logprobs.size :]).max()))
    return largest


@pytest.mark.slow
def test_sampled_logprobs_equal_forward_in_mixed_batches(backend):
    requests = [
        make_request(name, number, length)
        for number, length in enumerate(LENGTHS)
        for name in RANKS
        if name != "base" or length in (LENGTHS[0], LENGTHS[-1])
    ]
    assert largest_difference(backend, requests) < 1e-5
    assert largest_difference(backend, requests[::-1]) < 1e-5, "the order of requests does not matter"


@pytest.mark.slow
def test_adapters_change_the_logprobs(backend):
    """Checks that the adapters matter in the comparison above."""
    row = np.arange(2, 60, dtype=np.int32)
    base, *others = (backend.forward(scoring(ModelId(name), [row]))[0].logprobs for name in RANKS)
    assert all(np.abs(other - base).max() > 0.05 for other in others)
