"""The part that all phases with the SDK share: sampling, and training on the samples."""

import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

LOSS = "importance_sampling"
ADAM = types.AdamParams(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8)
RANK = 32
API_KEY = "tml-local"
_SAMPLE = re.compile(r"^(skyrl_tx_\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


def connect(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=API_KEY)


def create_adapter(service: tinker.ServiceClient, seed: int = 0) -> tinker.TrainingClient:
    """Create an adapter for the model that the server has."""
    (model,) = service.get_server_capabilities().supported_models
    assert model.model_name is not None
    return service.create_lora_training_client(model.model_name, rank=RANK, seed=seed).result()


def read_metrics(url: str) -> dict[str, float]:
    """Return the metrics of the server by name and labels, without histograms' buckets."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = {name + (labels or ""): float(value) for name, labels, value in _SAMPLE.findall(text)}
    return {name: value for name, value in found.items() if "_bucket{" not in name}


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, a continuation of it with its log-probabilities, and its advantage."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    advantage: float


class FirstResult:
    """Notes when the first of several requests had its result."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._lock = threading.Lock()

    def watch(self, future: "Future[Any]") -> None:
        future.add_done_callback(self._note)

    def _note(self, _: "Future[Any]") -> None:
        with self._lock:
            self.at = self.at or time.perf_counter()


def request_samples(
    sampler: tinker.SamplingClient, prompt: Sequence[int], samples: int, tokens: int, *, seed: int, greedy: bool = False
) -> "tinker.APIFuture[types.SampleResponse]":
    """Request samples that all have this number of tokens."""
    params = types.SamplingParams(max_tokens=tokens, stop=[], seed=seed, temperature=0.0 if greedy else 1.0)
    return sampler.sample(types.ModelInput.from_ints(list(prompt)), samples, params)


def build_datum(sample: Sample) -> types.Datum:
    """Return the datum that `rl_loop` of tinker-cookbook makes of a sample."""
    before = len(sample.prompt) - 1
    inputs = types.ModelInput.from_ints(sample.prompt).append(types.EncodedTextChunk(tokens=sample.tokens[:-1]))
    return types.Datum(
        model_input=inputs,
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[0] * before + sample.tokens, dtype="int64"),
            "logprobs": types.TensorData(data=[0.0] * before + sample.logprobs, dtype="float32"),
            "advantages": types.TensorData(
                data=[0.0] * before + [sample.advantage] * len(sample.tokens), dtype="float32"
            ),
        },
    )


def train(training: tinker.TrainingClient, datums: list[types.Datum]) -> types.ForwardBackwardOutput:
    """Run one step, and wait for it."""
    passed = training.forward_backward(datums, LOSS)
    stepped = training.optim_step(ADAM)
    output = passed.result()
    stepped.result()
    return output


def sample_greedily(sampler: tinker.SamplingClient, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """Return the greedy continuations of prompts and their log-probabilities."""
    futures = [request_samples(sampler, prompt, 1, tokens, seed=0, greedy=True) for prompt in prompts]
    sequences = [future.result().sequences[0] for future in futures]
    return {"tokens": [row.tokens for row in sequences], "logprobs": [list(row.logprobs or ()) for row in sequences]}
