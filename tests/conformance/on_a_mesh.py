"""Train and sample a tiny model on meshes and save all results.

`test_mesh.py` runs this program on virtual devices.

    python on_a_mesh.py MODEL_DIRECTORY OUTPUT_DIRECTORY {train,sample,long} {shared,own} fsdp=1 fsdp=4,tp=2

`sample` trains first. `long` computes the gradient of one long row after a step on other rows.
`shared` and `own` are forms of the experts' adapters. The results include `bytes`, the size of the
base weights on each device of the process. With `--host RANK ADDRESS` at the end, the program is
one of two processes.
"""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from skyrl_tx.backends.jax import devices
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.contract.backend import HostRank, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.losses import LOSSES

MODEL, SAMPLER = ModelId("m"), SamplerId("s")
STEP_LOSSES = ("cross_entropy", "ppo")
STEP = OptimizerParams(learning_rate=0.25, eps=10.0)
"""This step moves B to values near 0.1.

Larger adapters, or an `eps` below the gradients, would amplify rounding errors tenfold.

With these values, no activation of gpt-oss is so close to its clamp that rounding changes the
derivative.
"""
LONG = 16384
LENGTHS = (70, 49, 64, 50, 66, 96)  # one micro-batch, long enough for blockwise attention
PARTS = {StatePart.WEIGHTS, StatePart.OPTIMIZER, StatePart.GRADIENT}


def batch(step: int, loss: str, lengths: tuple[int, ...] = LENGTHS) -> PreparedModelPassBatch:
    draw = np.random.default_rng(step)
    inputs, config = LOSSES[loss].spec.inputs, dict(LOSSES[loss].spec.config)
    examples: list[PassExample] = []

    for length in lengths:
        filled = {name: draw.normal(-0.1, 0.3, length).astype(np.float32) for name in inputs}
        filled["target_tokens"] = draw.integers(0, 256, length, dtype=np.int32)
        if "logprobs" in filled:
            filled["logprobs"] -= np.log(256).astype(np.float32)  # near the logprobs of the model
        tokens = draw.integers(0, 256, length, dtype=np.int32)

        examples.append(
            PassExample(
                request_id=RequestId(f"r{step}"),
                model_id=MODEL,
                tokens=tokens,
                loss=loss,
                loss_inputs=filled,
                loss_config=config,
            )
        )

    return PreparedModelPassBatch(examples=tuple(examples))


def state(backend: JaxBackend, name: str) -> dict[str, np.ndarray]:
    """Return the gradient, the weights and the optimizer moments of the model."""
    held = backend.capture(MODEL, PARTS)
    trees = {
        "weights": held.parts[StatePart.WEIGHTS],
        "optimizer": held.parts[StatePart.OPTIMIZER],
        "gradient": held.parts[StatePart.GRADIENT],
    }
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    return {f"{name}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


def leaves(backend: JaxBackend) -> list[jax.Array]:
    state = backend._pool.get(MODEL)
    return jax.tree.leaves((state.adapter.weights, state.optimizer))


def have_equal_sharding(x: jax.Array, y: jax.Array) -> bool:
    return x.sharding.is_equivalent_to(y.sharding, x.ndim)


def train(backend: JaxBackend) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=4, seed=3)))
    found |= state(backend, "new")
    before = leaves(backend)

    for step, loss in enumerate(STEP_LOSSES):
        results = backend.forward_backward(batch(step, loss))
        found[f"{step}.logprobs"] = np.concatenate([result.logprobs for result in results])
        found[f"{step}.loss"] = np.array([result.sums["loss"] for result in results])
        found[f"{step}.experts"] = np.array([list(result.metrics.values()) for result in results])
        found |= state(backend, f"{step}.before")
        metrics = backend.optim_step(MODEL, replace(STEP, grad_clip_norm=5.0))
        found[f"{step}.norm"] = np.array(metrics["unclipped_grad_l2:mean"])
        found |= state(backend, f"{step}.after")
        if step == 0:  # B is no longer zero, and rounding errors have not accumulated
            found |= every_other_loss(backend)

    assert all(map(have_equal_sharding, before, leaves(backend))), "a step changed the sharding of an adapter"
    return found


def every_other_loss(backend: JaxBackend) -> dict[str, np.ndarray]:
    """Return the sums and the gradient of every other loss. The model does not change."""
    found: dict[str, np.ndarray] = {}
    for loss in sorted(LOSSES.keys() - set(STEP_LOSSES)):
        results = backend.forward_backward(batch(1, loss))
        found[f"{loss}.loss"] = np.array([result.sums["loss"] for result in results])
        found |= state(backend, loss)
        backend.clear_gradient(MODEL)
    return found


def long_row(backend: JaxBackend) -> dict[str, np.ndarray]:
    backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=4, seed=3)))
    backend.forward_backward(batch(0, "cross_entropy"))
    backend.optim_step(MODEL, STEP)  # so that B is not zero
    (result,) = backend.forward_backward(batch(1, "cross_entropy", (LONG,)))
    assert result.logprobs.shape == (LONG,)
    return {"logprobs": result.logprobs, "loss": np.array([result.sums["loss"]])} | state(backend, "long")


def sample(backend: JaxBackend) -> dict[str, np.ndarray]:
    backend.load_sampler(SAMPLER, backend.capture(MODEL, {StatePart.WEIGHTS}))
    deltas = backend.sample(PreparedSampleBatch(requests=(request(SAMPLER),)))
    found: dict[str, np.ndarray] = {}
    for index in range(3):
        own = [delta for delta in deltas if delta.index == index]
        found[f"sample.{index}.tokens"] = np.concatenate([delta.tokens for delta in own])
        found[f"sample.{index}.logprobs"] = np.concatenate([delta.logprobs for delta in own])
    prompt = next(delta.prompt for delta in deltas if delta.prompt is not None)
    return found | {"sample.prompt": prompt.logprobs[1:]}


def request(sampler: SamplerId) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId("s"),
        sampler=sampler,
        prompt=np.arange(7, 27, dtype=np.int32),
        num_samples=3,
        params=SamplingParams(seed=5, max_tokens=12, temperature=0.7, eos_stops=False),
        options=PromptOptions(logprobs=True),
    )


def bytes_by_device(params: object) -> Counter[int]:
    counted: Counter[int] = Counter()
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            counted[shard.device.id] += shard.data.nbytes
    return counted


def main() -> None:
    arguments, _, host = " ".join(sys.argv[1:]).partition(" --host ")
    directory, output, last, expert_lora, *meshes = arguments.split(" ")
    if host:
        rank, coordinator = host.split(" ")
        devices.join(HostRank(rank=int(rank), size=2, coordinator=coordinator))

    for mesh in meshes:
        config = JaxConfig(
            compile_cache_dir=None,
            dtype="float32",
            expert_lora=expert_lora,  # type: ignore[arg-type]
            mesh=MeshConfig(**dict(pair.split("=") for pair in mesh.split(","))),  # type: ignore[arg-type]
            micro_batch_tokens=768,
            sample_slots=4,
            async_decoding=True,  # has no effect on a single CPU device
            max_sample_tokens=256,
            decode_slice_tokens=4,
        )

        backend = JaxBackend(directory, config)
        backend.start()
        found = long_row(backend) if last == "long" else train(backend)
        if last == "sample":
            found |= sample(backend)
        found["bytes"] = np.array(list(bytes_by_device(backend._params).values()))
        np.savez(Path(output) / f"{mesh}.npz", **found)


if __name__ == "__main__":
    main()
