"""The checks that use JAX: its devices, the memory plan of a model on them, and a training step and a sample.

This is a program: `python -m skyrl_tx.tools.doctor.probe` reads a `ProbeQuestion` as JSON from standard input, and
writes its findings to standard output. As a separate process it can be given a time limit, and its device memory is
released when it ends.
"""

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import numpy as np

from skyrl_tx import DISTRIBUTION, models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import get_offload_limit, read_memory_limit
from skyrl_tx.backends.jax.start_plan import StartPlan, make_training_batch, plan_start
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.process.memory import get_memory_limit, read_available_memory
from skyrl_tx.process.text import format_bytes
from skyrl_tx.tools.doctor.findings import Finding, error, ok, warning
from skyrl_tx.tools.doctor.machine import ProbeQuestion
from skyrl_tx.tools.quickstart.model import open_built_in_model
from skyrl_tx.weights import hf

_SHORT_TOKENS = 4096
"""The command warns if samples can have fewer tokens than this, because a typical sample would not fit."""
_MODEL_ADVICE = "name the directory or hub id of a supported model; for the hub, check the network and HF_TOKEN"
_MESH_ADVICE = "the product of the sizes must be the number of devices, and each size must divide the model's"

_NUM_TRAINED, _NUM_PROMPT, _NUM_NEW = 128, 32, 16
"""Tokens of the training example, of the prompt and of the sample."""
_SMALL = {
    "compile_cache_dir": None,  # the compiler is part of the check
    "micro_batch_tokens": 256,
    "max_lora_adapters": 1,
    "sample_slots": 4,
    "max_sample_tokens": 4096,
    "prefix_cache_tokens": 0,
}
"""Settings that keep the memory of the check small, so that it also works while a server uses the devices."""


def check_devices(question: ProbeQuestion) -> Iterator[Finding]:
    """Check the devices that JAX finds, and the memory plan of the model on them."""
    config = JaxConfig.model_validate(question.backend_config)
    try:
        devices = jax.devices()
    except RuntimeError as problem:
        reason = " ".join(str(problem).split())
        yield error("devices", f"JAX finds no device: {reason}", "check the driver and JAX_PLATFORMS")
        return

    # Say what they are.
    kinds = Counter((device.device_kind, device.platform, read_memory_limit([device])) for device in devices)
    for (kind, platform, limit), number in kinds.items():
        memory = "" if limit is None else f"; it may take {format_bytes(limit)} of each"
        yield ok("devices", f"JAX {jax.__version__} finds {number} × {kind} ({platform}){memory}")
    if question.has_gpus and all(device.platform == "cpu" for device in devices):
        yield error(
            "devices",
            "there is a GPU, but JAX does not use it",
            f"pip install '{DISTRIBUTION}[cuda12]' or '{DISTRIBUTION}[cuda13]', depending on the driver; unset "
            "JAX_PLATFORMS",
        )

    # Plan the model on them.
    try:
        yield from check_model(question, config)
    except mesh.MeshError as problem:
        yield error("model", f"--backend-config.mesh: {problem}", _MESH_ADVICE)
    except (models.UnsupportedModel, hf.CheckpointError) as problem:
        yield error("model", f"--base-model: {problem}", _MODEL_ADVICE)


def check_model(question: ProbeQuestion, config: JaxConfig) -> Iterator[Finding]:
    """Check the files of the model, and make the plan that the backend would make. Does not load the weights.

    Raises MeshError, UnsupportedModel or CheckpointError.
    """
    layout = mesh.make_layout(config.mesh)
    if not question.base_model:
        return

    # The model
    directory = hf.resolve_model(question.base_model, with_weights=False)
    model = replace(models.read_model(directory)[1], expert_lora=config.expert_lora)
    mesh.check_divisible(layout, model)
    file_bytes = _count_weight_bytes(question.base_model, directory) if config.load_format == "auto" else None
    has_end = bool(hf.read_eos_token_ids(directory))

    # The plan
    assert layout.mesh is not None
    devices = list(layout.mesh.devices.flat)
    limit_bytes = read_memory_limit(devices)
    plan = plan_start(
        config,
        layout,
        model,
        np.dtype(mesh.choose_dtype(config, layout)),
        platform=mesh.get_platform(layout),
        limit_bytes=limit_bytes,
        offload_bytes=get_offload_limit(devices),
    )

    # The files
    if file_bytes is not None:
        yield ok("model", f"{plan.num_parameters:,} parameters, weight files of {format_bytes(file_bytes)}")
    elif config.load_format == "auto":
        yield ok("model", f"{plan.num_parameters:,} parameters; the first start downloads the weights")
    else:
        yield ok("model", f"{plan.num_parameters:,} parameters with random weights")
    if not has_end:
        yield warning("model", "its files name no token that ends a sample", "clients must set `stop` or `max_tokens`")
    yield from check_plan(plan, config, limit_bytes, model.max_context_length, is_serving=question.is_serving)


def _count_weight_bytes(base_model: str, directory: Path) -> int | None:
    """Return the size of the weight files, or None if a model of the hub is not downloaded yet.

    Raises CheckpointError if files are missing from a directory that the user named.
    """
    if not Path(base_model).expanduser().is_dir() and not any(directory.glob("*.safetensors")):
        return None
    return sum(path.stat().st_size for path in set(hf.locate_tensors(directory).values()))


def check_plan(
    plan: StartPlan, config: JaxConfig, limit_bytes: int | None, model_length: int, *, is_serving: bool
) -> Iterator[Finding]:
    """Check that the plan fits into memory, and that its limits are as high as users expect."""
    # Do the weights fit? On CPU the backend plans with the memory that its process may use, and decoding keeps a second
    # copy of the layers.
    limit, weights = limit_bytes or get_memory_limit(), plan.weight_bytes if limit_bytes else plan.host_weight_bytes
    summary = f"the weights take {format_bytes(weights)} in {plan.dtype} of {format_bytes(limit)}"
    if weights >= limit:
        yield error(
            "memory",
            f"the model does not fit: {summary}",
            "use a mesh of more devices, --backend-config.dtype bfloat16, or a smaller model",
        )
        return

    # What the rest of the memory is for.
    yield ok(
        "memory",
        f"{summary}; KV cache of {plan.samples.tokens} tokens; micro-batches of {plan.passes.micro_batch_tokens} tokens"
        f"{' with rematerialization' if plan.passes.remat else ''}; "
        f"{plan.max_models} models of rank {config.max_lora_rank} in training",
    )
    if not limit_bytes and not is_serving and weights + plan.host_bytes > (available := read_available_memory()):
        finding = error if weights > available else warning
        yield finding(
            "memory",
            f"only {format_bytes(available)} of memory are available, but weights, KV cache and models may take "
            f"{format_bytes(weights + plan.host_bytes)} in time",
            "end other programs, or lower --backend-config.max-sample-tokens and --backend-config.max-lora-adapters",
        )

    # Limits that users will notice.
    if plan.samples.max_length < min(_SHORT_TOKENS, model_length):
        yield warning(
            "memory",
            f"samples can have at most {plan.samples.max_length} tokens, although the model allows {model_length}",
            "free memory with a lower --backend-config.max-lora-rank, bfloat16, or a mesh of more devices",
        )
    if plan.max_models == 1:
        yield warning(
            "memory",
            f"only one model of rank {config.max_lora_rank} can train at a time; idle models are evicted to disk",
            "lower --backend-config.max-lora-rank if clients use lower ranks",
        )


def check_computation(question: ProbeQuestion) -> Iterator[Finding]:
    """Train and sample twice with the model `tiny`, and check the numbers."""
    with open_built_in_model("tiny") as directory:
        backend = JaxBackend(directory, JaxConfig.model_validate({**question.backend_config, **_SMALL}))
        found = backend.start()
        times: list[float] = []
        for name in ("first", "again"):
            started = time.monotonic()
            loss, logprob = _train_and_sample(backend, name)
            times.append(time.monotonic() - started)
        backend.close()
    yield judge_numbers(found.devices[0], found.vocab_size, loss, logprob, times)


def judge_numbers(device: str, vocab_size: int, loss: float, logprob: float, times: list[float]) -> Finding:
    """Return whether loss and log-probability for each token can be right.

    A loss of more than twice the loss of equal probabilities is wrong. `times` has the seconds of a training step and a
    sample with compilation, and without.
    """
    numbers = f"loss {loss:.3f}, log-probability of a drawn token {logprob:.3f}"
    if 0 < loss < 2 * math.log(vocab_size) and -math.inf < logprob <= 0:
        seconds = f"{times[0]:.1f} s with compilation, then {times[1]:.2f} s"
        return ok("smoke", f"{device} trained and sampled with the model tiny in {seconds}; {numbers}")
    advice = "try --backend-config.kernels loops: if the numbers are then right, a kernel is wrong, so report it"
    return error("smoke", f"{device} computes wrong numbers: {numbers}", advice)


def _train_and_sample(backend: JaxBackend, name: str) -> tuple[float, float]:
    """Take one training step, and sample from the result. Returns the loss and the mean log-probability."""
    model, sampler = ModelId(name), SamplerId(name)
    backend.create_model(model, ModelSpec(lora=LoraSpec(rank=8, seed=0)))
    results = backend.forward_backward(make_training_batch(model, _NUM_TRAINED, _NUM_TRAINED, 1))
    backend.optim_step(model, OptimizerParams())
    backend.load_sampler(sampler, backend.capture(model, {StatePart.WEIGHTS}))

    request = SampleRequest(
        request_id=RequestId(name),
        sampler=sampler,
        prompt=np.arange(_NUM_PROMPT, dtype=np.int32),
        num_samples=1,
        params=SamplingParams(seed=0, max_tokens=_NUM_NEW, eos_stops=False),
        options=PromptOptions(),
    )
    deltas = backend.sample(PreparedSampleBatch(requests=(request,)))
    backend.drop_sampler(sampler)
    backend.delete_model(model)
    logprobs = np.concatenate([delta.logprobs for delta in deltas])
    return results[0].sums["loss"] / _NUM_TRAINED, float(logprobs.mean())


def main() -> None:
    """Read a question from standard input, and write the findings to standard output."""
    logging.disable(logging.WARNING)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeQuestion)
    check = check_devices if question.check == "devices" else check_computation
    sys.stdout.buffer.write(msgspec.json.encode(list(check(question))))


if __name__ == "__main__":
    main()
