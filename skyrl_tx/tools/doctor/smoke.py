"""Trains and samples once on the devices, with the built-in model `tiny`: the check of `skyrl-tx doctor --smoke`.

This is a program: `python -m skyrl_tx.tools.doctor.smoke` reads a `ProbeQuestion` as JSON from standard input and
writes a `SmokeAnswer` to standard output. As a separate process it can be given a time limit, and its device memory is
released when it ends.
"""

import math
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, JaxFlags
from skyrl_tx.backends.jax.start_plan import make_training_batch
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok
from skyrl_tx.tools.doctor.machine import ProbeQuestion, answer_parent, ask_child
from skyrl_tx.tools.quickstart.model import open_built_in_model

_TIMEOUT_S = 300.0
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


class SmokeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The output of the program."""

    device: str
    loss: float
    """Cross-entropy for each token, in nats."""
    highest_loss: float
    """A loss above this number is wrong: twice the loss of equal probabilities."""
    logprob: float
    """The mean log-probability of the tokens of the sample."""
    first_s: float
    """Seconds of the first training step and the first sample, including compilation."""
    again_s: float
    """Seconds of the same step and sample, once more."""


def check_computation(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that the devices compile and run a training step and a sample of the model `tiny`."""
    config = subject.settings.backend_config
    if not isinstance(config, JaxFlags):
        yield ok("smoke", f"not examined: the checks do not support the backend {subject.settings.backend}")
        return

    answer = ask_child(
        "smoke", ProbeQuestion(base_model="", backend_config=config.model_dump(mode="json")), SmokeAnswer, _TIMEOUT_S
    )
    if isinstance(answer, Finding):
        yield answer
        return
    numbers = f"loss {answer.loss:.3f}, log-probability of a drawn token {answer.logprob:.3f}"
    if 0 < answer.loss < answer.highest_loss and -math.inf < answer.logprob <= 0:
        times = f"{answer.first_s:.1f} s with compilation, then {answer.again_s:.2f} s"
        yield ok("smoke", f"{answer.device} trained and sampled with the model tiny in {times}; {numbers}")
    else:
        advice = "try --backend-config.kernels loops: if the numbers are then right, a kernel is wrong, so report it"
        yield error("smoke", f"{answer.device} computes wrong numbers: {numbers}", advice)


def answer_question(question: ProbeQuestion) -> SmokeAnswer:
    """Start the backend with the model `tiny`, then train and sample twice."""
    with open_built_in_model("tiny") as directory:
        backend = JaxBackend(directory, JaxConfig.model_validate({**question.backend_config, **_SMALL}))
        found = backend.start()
        times: list[float] = []
        for name in ("first", "again"):
            started = time.monotonic()
            loss, logprob = _train_and_sample(backend, name)
            times.append(time.monotonic() - started)
        backend.close()

    first_s, again_s = times
    return SmokeAnswer(
        device=found.devices[0],
        loss=loss,
        highest_loss=2 * math.log(found.vocab_size),
        logprob=logprob,
        first_s=first_s,
        again_s=again_s,
    )


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


if __name__ == "__main__":
    answer_parent(answer_question)
