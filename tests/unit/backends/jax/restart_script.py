"""Start a backend, use every operation once and print how many programs were compiled.

Run by test_restart.py:

    python restart_script.py MODEL_DIRECTORY CACHE_DIRECTORY
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.testing.backend_driver import scoring

MODEL, SAMPLER = ModelId("m"), SamplerId("s")
SPEC = ModelSpec(lora=LoraSpec(rank=8, seed=1))


def use_every_operation(model: str, cache: Path) -> None:
    backend = JaxBackend(
        model,
        JaxConfig(
            compile_cache_dir=cache,
            max_context_length=64,
            micro_batch_tokens=64,
            max_lora_adapters=1,
            max_lora_rank=8,
            sample_slots=2,
            max_sample_tokens=128,
        ),
    )

    backend.start()
    backend.create_model(MODEL, SPEC)
    backend.forward_backward(scoring(MODEL, [np.arange(30, dtype=np.int32)]))
    backend.optim_step(MODEL, OptimizerParams(grad_clip_norm=1.0))

    with tempfile.TemporaryDirectory() as directory:
        backend.capture(MODEL, ALL_PARTS).write(Path(directory))
        backend.restore(MODEL, SPEC, backend.open_snapshot(Path(directory)), ALL_PARTS)
    backend.load_sampler(SAMPLER, backend.capture(MODEL, {StatePart.WEIGHTS}))

    request = SampleRequest(
        request_id=RequestId("r"),
        sampler=SAMPLER,
        prompt=np.arange(10, dtype=np.int32),
        num_samples=2,
        params=SamplingParams(seed=0, max_tokens=4, eos_stops=False),
        options=PromptOptions(logprobs=True),
    )
    backend.sample(PreparedSampleBatch(requests=(request,)))
    backend.close()


if __name__ == "__main__":
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    use_every_operation(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps({"programs": events["compile_requests_use_cache"], "found": events["cache_hits"]}))
