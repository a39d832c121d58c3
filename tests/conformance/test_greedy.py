"""Greedy decoding of hundreds of prompts in one batch equals transformers' `generate`, token for token."""

from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.models import FAMILIES
from skyrl_tx.testing.tiny_models import LLAMA3_ROPE, write_model
from tests.support.client_environments import TORCH

NEW = 24  # as in reference/greedy_reference.py
PROMPTS = {7: 100, 32: 100, 90: 56}  # length: number of prompts
VARIANTS = {
    "LlamaForCausalLM": {"tied_embeddings": False, "rope_scaling": LLAMA3_ROPE},
    "Qwen2ForCausalLM": {"head_dim": 8},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "MistralForCausalLM": {"keys": {"sliding_window": 48}},
    "GptOssForCausalLM": {},
    "Qwen3_5ForCausalLM": {"num_layers": 4},
    "Qwen3_5MoeForCausalLM": {"num_layers": 4},
    "Qwen3NextForCausalLM": {"num_layers": 4},
    "DeepseekV3ForCausalLM": {"num_layers": 3},
    "Glm4MoeForCausalLM": {"num_layers": 3},
    "Glm4MoeLiteForCausalLM": {"num_layers": 3},
    "NemotronHForCausalLM": {},
    "Gemma3ForCausalLM": {"num_layers": 3, "tied_embeddings": False},  # tied embeddings would repeat tokens
}
COVERED_FAMILIES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"),
)
"""Families that CI leaves out.

The other families and test_decoding.py cover their decoding.
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directories(tmp_path_factory, client_environment) -> dict[str, Path]:
    """Write all models and the reference continuations of their prompts, which one process computes."""
    environment = client_environment(TORCH)
    draw, made = np.random.default_rng(3), {}
    assert set(VARIANTS) == {family.architecture for family in FAMILIES.values()}
    for name, variant in VARIANTS.items():
        made[name] = write_model(tmp_path_factory.mktemp(name), name, std=0.2, **variant)
        np.savez(
            made[name] / "prompts.npz",
            **{str(length): draw.integers(2, 256, (count, length)) for length, count in PROMPTS.items()},
        )
    environment.run(Path(__file__).parent / "reference" / "greedy_reference.py", *made.values())
    return made


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in COVERED_FAMILIES else ()) for name in VARIANTS],
)
def test_greedy_tokens_of_a_large_batch_equal_transformers(directories, family):
    directory = directories[family]
    with np.load(directory / "prompts.npz") as prompts, np.load(directory / "greedy.npz") as answers:
        prompt_by_name = {f"{name}.{row}": prompt for name in prompts for row, prompt in enumerate(prompts[name])}
        expected = {f"{name}.{row}": tokens for name in answers for row, tokens in enumerate(answers[name])}

    config = JaxConfig(
        compile_cache_dir=None,
        dtype="float32",
        sample_slots=32,
        max_sample_tokens=32 * 128,
        max_topk_logprobs=0,
    )
    backend = JaxBackend(str(directory), config)
    backend.start()

    requests = [
        SampleRequest(
            request_id=RequestId(name),
            sampler=None,
            prompt=prompt.astype(np.int32),
            num_samples=1,
            params=SamplingParams(seed=0, max_tokens=NEW, temperature=0.0, eos_stops=False),
            options=PromptOptions(),
        )
        for name, prompt in prompt_by_name.items()
    ]

    tokens: dict[str, list[int]] = {name: [] for name in prompt_by_name}
    backend.begin_sample(PreparedSampleBatch(requests=tuple(requests)))
    while deltas := backend.step_sample():
        for delta in deltas:
            tokens[delta.request_id].extend(delta.tokens.tolist())
    backend.close()
    assert len(tokens) == sum(PROMPTS.values())
    assert [name for name in prompt_by_name if tokens[name] != expected[name].tolist()] == []
    assert len({tuple(continuation) for continuation in tokens.values()}) > 200, "the continuations differ"
