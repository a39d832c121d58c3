"""Start a backend with a warm-up, use it, and print the programs that were compiled later.

Run by test_warmup.py:

    python warmup_script.py MODEL_DIRECTORY
"""

import json
import sys

import jax
import numpy as np

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.testing.backend_driver import scoring

CONFIG = JaxConfig(
    compile_cache_dir=None,
    max_context_length=64,
    micro_batch_tokens=32,
    max_sample_tokens=64,
    sample_slots=4,
    max_lora_rank=8,
    max_lora_adapters=1,
    warmup=True,
)


def request(
    sampler: SamplerId | None, prompt: int, max_tokens: int, num_samples: int, options: PromptOptions
) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(f"of {sampler}"),
        sampler=sampler,
        prompt=np.zeros(prompt, np.int32),
        num_samples=num_samples,
        params=SamplingParams(seed=0, max_tokens=max_tokens, eos_stops=False),
        options=options,
    )


def list_late_programs(directory: str) -> list[str]:
    """Use every operation in common sizes.

    Return the names of the programs that were compiled after the start.
    """
    backend = JaxBackend(directory, CONFIG)
    capabilities = backend.start()
    assert (capabilities.max_context_length, capabilities.max_sample_tokens) == (64, 64)

    model = ModelId("m")
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=8, seed=1)))  # the only adapter slot is free again
    compiled: list[str] = []

    def note(event: str, _: float, **labels: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(labels["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for num_tokens, longest in ((14, 7), (30, 32), (60, 20), (160, 32), (60, 60), (130, 64)):  # the budget is 32
            lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
            batch = scoring(model, [np.arange(length, dtype=np.int32) for length in lengths])
            assert all(np.isfinite(result.logprobs).all() for result in backend.forward_backward(batch))
            backend.forward(batch)
            backend.optim_step(model, OptimizerParams())

        for number in range(8):  # all sampler slots, with two ranks
            if number == 4:
                backend.delete_model(model)
                backend.create_model(model, ModelSpec(lora=LoraSpec(rank=2, seed=1)))
            sampler = SamplerId(f"s{number}")
            backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))

        for prompt, new, num_samples in ((3, 1, 1), (3, 4, 2), (20, 12, 1), (9, 20, 70), (14, 2, 9)):
            targets = np.ones((prompt - 1, 5), np.int64)
            about_prompt = (
                PromptOptions(logprobs=True),
                PromptOptions(logprobs=True, topk=7),
                PromptOptions(target_tokens=targets),
                PromptOptions(alt_tokens_k=3),
            )

            for options in (PromptOptions(), *about_prompt[: 4 if new == 1 else 1]):
                for samplers in ((None,), (sampler,), (None, sampler)):
                    requests = tuple(request(one, prompt, new, num_samples, options) for one in samplers)
                    assert backend.sample(PreparedSampleBatch(requests=requests))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)

    backend.close()
    return compiled


if __name__ == "__main__":
    print(json.dumps(list_late_programs(sys.argv[1])))
