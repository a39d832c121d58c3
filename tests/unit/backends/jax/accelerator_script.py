"""Make the backend treat this CPU as a GPU, run an RL loop, and print the programs that the loop compiled.

`test_warmup.py` runs this script and checks that the loop compiled nothing, because all programs were
compiled at the start. It also checks that their compilation began before the weights were loaded.
Usage:

    python accelerator_script.py MODEL_DIRECTORY CACHE_DIRECTORY
"""

import json
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from skyrl_tx.backends.jax import backend as backend_module
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.sample.slice_rows import RowCounts
from skyrl_tx.backends.jax.shapes import MAX_PROMPTS_TOGETHER
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.weights import hf

MICRO_BATCH, CONTEXT = 256, 512
LOSSES = "cross_entropy", "importance_sampling", "ppo", "cispo"


class FakeGpuRunner(ModelRunner):
    """Runs the sampling programs of a GPU on a CPU."""

    @override
    def _make_row_counts(self) -> RowCounts:
        # As on a GPU, all rows decode in one program, and a program prefills multiple prompts.
        self._is_single_cpu, self._merges, self.prompts_of_shard = False, True, MAX_PROMPTS_TOGETHER
        return super()._make_row_counts()


def make_config(cache: Path) -> JaxConfig:
    return JaxConfig(
        compile_cache_dir=cache,
        kernels="loops",  # attention in plain JAX loops, because the GPU kernels do not run on a CPU
        max_context_length=CONTEXT,
        micro_batch_tokens=MICRO_BATCH,
        max_sample_tokens=20 * CONTEXT,
        sample_slots=20,
        max_lora_adapters=2,
        max_lora_rank=32,
        max_sampler_adapters=4,
    )


def make_sample_request(name: str, sampler: SamplerId | None, length: int, new: int, num_samples: int) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(name),
        sampler=sampler,
        prompt=np.arange(length, dtype=np.int32) % 200,
        num_samples=num_samples,
        params=SamplingParams(seed=len(name), max_tokens=new, eos_stops=False),
        options=PromptOptions(),
    )


def make_pass(model: ModelId, loss: str, lengths: list[int]) -> PreparedModelPassBatch:
    def make_example(length: int) -> PassExample:
        inputs: dict[str, Any] = {name: np.full(length, 0.5, np.float32) for name in LOSS_SPECS[loss].inputs}
        return PassExample(
            request_id=RequestId(loss),
            model_id=model,
            tokens=np.arange(length, dtype=np.int32) % 200,
            loss=loss,
            loss_inputs={**inputs, "target_tokens": np.ones(length, np.int32)},
            loss_config=LOSS_SPECS[loss].config,
        )

    return PreparedModelPassBatch(examples=tuple(map(make_example, lengths)))


def train(backend: JaxBackend) -> None:
    """Take steps of RL with prompts and answers of many lengths, and two models of different ranks."""
    draw = np.random.default_rng(0)
    models = {ModelId("low"): 4, ModelId("default"): 32}
    for model, rank in models.items():
        backend.create_model(model, ModelSpec(lora=LoraSpec(rank=rank, seed=1)))

    # Sample with both models, then train them.
    for step in range(3):
        samplers: list[SamplerId | None] = [None]
        for model in models:
            sampler = SamplerId(f"{model} {step % 2}")
            backend.drop_sampler(sampler)
            backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))
            if step == 1:
                samplers.append(sampler)
            requests = tuple(
                make_sample_request(f"{sampler} {n}", sampler, int(length), int(new), int(num))
                for n, (length, new, num) in enumerate(
                    zip(draw.integers(2, 330, 6), draw.integers(1, 60, 6), draw.integers(1, 9, 6), strict=True)
                )
            )
            assert backend.sample(PreparedSampleBatch(requests=requests))

        mixed = [make_sample_request(f"mixed {sampler}", sampler, 100, 20, 3) for sampler in samplers]
        assert backend.sample(PreparedSampleBatch(requests=tuple(mixed)))

        for model in models:
            for loss in LOSSES:
                lengths = draw.integers(8, MICRO_BATCH, 1 + 2 * step).tolist()
                backend.forward_backward(make_pass(model, loss, [130, 140, *lengths]))  # more than one micro-batch
            backend.gradient_norm(model)
            backend.optim_step(model, OptimizerParams())


def main(directory: str, cache: Path) -> None:
    events: Counter[str] = Counter()
    compiled_in_loop: list[str] = []
    mesh.get_platform = lambda _: "gpu"
    backend_module.ModelRunner = FakeGpuRunner  # type: ignore[misc]
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))

    def note(event: str, _: float, **labels: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled_in_loop.append(labels["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    backend, load, kinds_queued_before_load = JaxBackend(directory, make_config(cache)), hf.load, list[str]()

    def load_weights(*arguments: Any, **named: Any) -> Any:
        assert backend._compiler is not None
        kinds_queued_before_load.extend(
            sorted({type(key).__name__ for key, _ in chain(*backend._compiler._needed.values())})
        )
        return load(*arguments, **named)

    # Start, and wait until all programs are compiled. Then run the loop.
    hf.load = load_weights
    backend.start()
    while backend.meters().progress is not None:  # some sampling programs compile in the background
        time.sleep(0.05)
    compiled_in_loop.clear()

    train(backend)
    backend.close()
    num_programs, num_from_cache = events["compile_requests_use_cache"], events["cache_hits"]
    print(
        json.dumps(
            {
                "kinds_queued_before_load": kinds_queued_before_load,
                "compiled_in_loop": compiled_in_loop,
                "num_programs": num_programs,
                "num_from_cache": num_from_cache,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
