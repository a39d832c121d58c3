"""Sampling through a real server: two thousand futures that wait at once, and iterations of reinforcement learning.

What an iteration takes beside the device is told by a backend that does the same work without server, client or
database, in this process, in turn with the server: neither works while the other does.
"""

import logging
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from common import quantile, quartiles
from tinker import types

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.listening import raise_file_limit
from skyrl_tx.testing.live_server import LiveServer

LOSS = "importance_sampling"
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is asked of the model in a directory: so many prompts of one length, with samples of so many tokens."""

    model: Path
    vocab_size: int
    rank: int
    prompts: int
    length: int
    samples: int
    tokens: int

    def config(self, slots: int) -> JaxConfig:
        """As the server's flags say it too."""
        return JaxConfig(
            sample_slots=slots,
            max_sample_tokens=slots * 2 * (self.length + self.tokens),
            max_lora_adapters=2,
            max_sampler_adapters=4,
        )

    def prompts_of(self, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [draw.integers(2, self.vocab_size, self.length).astype(np.int32) for _ in range(self.prompts)]


@contextmanager
def served(sizes: Sizes, slots: int) -> Iterator[LiveServer]:
    """`skyrl-tx serve` in processes of its own."""
    config = sizes.config(slots)
    flags = ["--base-model", str(sizes.model), "--backend", "jax"]
    for name in ("sample_slots", "max_sample_tokens", "max_lora_adapters", "max_sampler_adapters"):
        flags += [f"--backend-config.{name.replace('_', '-')}", str(getattr(config, name))]
    raise_file_limit()
    with tempfile.TemporaryDirectory() as directory, LiveServer(Path(directory), flags=flags) as server:
        yield server


def client_of(server: LiveServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key="tml-local")


def resident_mb(pid: int | str) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


class Statuses(logging.Handler):
    """How often each status was answered, as the SDK's HTTP client logs it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counts: Counter[int] = Counter()

    def __enter__(self) -> "Statuses":
        logger = logging.getLogger("httpx")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("httpx").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        *_, status, _reason = record.args
        assert isinstance(status, int)
        self.counts[status] += 1


class Peaks:
    """The largest resident memory of some processes, looked at ten times a second."""

    def __init__(self, pids: dict[str, int | str]) -> None:
        self._pids = pids
        self.before = {name: resident_mb(pid) for name, pid in pids.items()}
        self.peak = dict(self.before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            for name, pid in self._pids.items():
                self.peak[name] = max(self.peak[name], resident_mb(pid))

    def report(self) -> dict[str, str]:
        """Megabytes before and at the peak."""
        return {name: f"{self.before[name]} -> {self.peak[name]}" for name in self._pids}


def futures(sizes: Sizes, count: int, slots: int) -> dict[str, Any]:
    """So many futures of one client at once; meanwhile another client asks for single tokens, one after the other."""
    params = types.SamplingParams(max_tokens=sizes.tokens, stop=[])
    one = types.SamplingParams(max_tokens=1, stop=[])
    prompts = [types.ModelInput.from_ints(row.tolist()) for row in sizes.prompts_of(1)]
    with served(sizes, slots) as server, client_of(server) as service, client_of(server) as other_service:
        client, other = (
            each.create_sampling_client(base_model=str(sizes.model)).result() for each in (service, other_service)
        )
        for warm in [client.sample(prompt, 1, params) for prompt in prompts]:
            warm.result()
        lone: list[float] = []
        for prompt in prompts:
            lone.append(seconds(lambda prompt=prompt: other.sample(prompt, 1, one).result()))
        errors: list[str] = []
        ended: list[float] = []
        under_load: list[float] = []
        pids: dict[str, int | str] = {"API": server.pid, "engine": server.engine_pid, "client": "self"}
        with Statuses() as statuses, Peaks(pids) as peaks, ThreadPoolExecutor(64) as pool:
            begun = time.perf_counter()

            def wait(future: Any) -> None:
                try:
                    assert len(future.result().sequences[0].tokens) == sizes.tokens
                except Exception as error:  # each is counted and shown
                    errors.append(f"{type(error).__name__}: {error}")
                ended.append(time.perf_counter() - begun)

            pending = [client.sample(prompts[index % len(prompts)], 1, params) for index in range(count)]
            submitted_s = time.perf_counter() - begun
            waits = [pool.submit(wait, future) for future in pending]
            while not all(each.done() for each in waits):
                prompt = prompts[len(under_load) % len(prompts)]
                under_load.append(seconds(lambda prompt=prompt: other.sample(prompt, 1, one).result()))
            elapsed = time.perf_counter() - begun
    return {
        "futures": count,
        "errors": len(errors),
        "first_errors": errors[:3],
        "answers": dict(sorted(statuses.counts.items())),
        "resident_mb": peaks.report(),
        "submitted_s": round(submitted_s, 2),
        "all_s": round(elapsed, 2),
        "tokens_per_s": round(count * sizes.tokens / elapsed, 1),
        "first_result_s": round(min(ended), 2),
        "result_s": quartiles(ended, 2),
        "first_token_alone_s": quartiles(lone),
        "first_token_under_load_s": {**quartiles(under_load), "p95": round(quantile(under_load, 0.95), 3)},
    }


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@dataclass(slots=True)
class Lap:
    """When the parts of an iteration were done, in seconds."""

    saved: float
    sampled: float
    trained: float


def iterations(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Iterations through the SDK and a server, in turn with the same work on a bare backend."""
    slots = sizes.prompts * sizes.samples
    laps: list[tuple[Lap, Lap]] = []
    with served(sizes, slots) as server, client_of(server) as service:
        bare = Bare(sizes, slots)
        training = service.create_lora_training_client(str(sizes.model), rank=sizes.rank, seed=0).result()
        for seed in range(repeats + 1):
            pair = through_the_sdk(sizes, training, seed), bare.iteration(seed)
            if seed:  # the first compiles
                laps.append(pair)
        bare.close()
    parts = {"save": "saved", "until sampled": "sampled", "all": "trained"}
    return {
        **{f"served, {name}, s": quartiles([getattr(ours, key) for ours, _ in laps]) for name, key in parts.items()},
        **{f"bare, {name}, s": quartiles([getattr(bare, key) for _, bare in laps]) for name, key in parts.items()},
        "share outside the backend": quartiles([1 - bare.trained / ours.trained for ours, bare in laps]),
    }


def through_the_sdk(sizes: Sizes, training: tinker.TrainingClient, seed: int) -> Lap:
    """One iteration as the cookbook's loops do it."""
    begun = time.perf_counter()
    sampler = training.save_weights_and_get_sampling_client().result()
    saved = time.perf_counter() - begun
    prompts = sizes.prompts_of(seed)
    pending = [
        sampler.sample(
            types.ModelInput.from_ints(prompt.tolist()),
            sizes.samples,
            types.SamplingParams(max_tokens=sizes.tokens, stop=[], seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]
    data: list[types.Datum] = []
    for prompt, answer in zip(prompts, pending, strict=True):
        for index, sequence in enumerate(answer.result().sequences):
            row = np.concatenate([prompt, sequence.tokens])
            inputs = loss_inputs(row, np.asarray(sequence.logprobs, np.float32), index)
            inputs["target_tokens"] = inputs["target_tokens"].astype(np.int64)
            data.append(
                types.Datum(model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs=dict(inputs))
            )
    sampled = time.perf_counter() - begun
    passed = training.forward_backward(data, LOSS)
    stepped = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    passed.result()
    stepped.result()
    return Lap(saved, sampled, time.perf_counter() - begun)


def loss_inputs(row: np.ndarray, logprobs: np.ndarray, index: int) -> dict[str, np.ndarray]:
    """Of a prompt with its continuation: rewards are made up."""
    before = np.zeros(row.size - 1 - logprobs.size, np.float32)
    advantages = np.full(logprobs.size, 1.0 if index % 2 else -1.0, np.float32)
    return {
        "target_tokens": row[1:].astype(np.int32),
        "logprobs": np.concatenate([before, logprobs]),
        "advantages": np.concatenate([before, advantages]),
        "weights": np.concatenate([before, np.ones_like(logprobs)]),
    }


class Bare:
    """The same iteration on a backend alone: what an engine would have it do, and nothing else."""

    def __init__(self, sizes: Sizes, slots: int) -> None:
        self._sizes, self._model = sizes, ModelId("m")
        self._backend = JaxBackend(str(sizes.model), sizes.config(slots))
        self._backend.start()
        self._backend.create_model(self._model, ModelSpec(lora=LoraSpec(rank=sizes.rank, seed=0)))

    def close(self) -> None:
        self._backend.close()

    def iteration(self, seed: int) -> Lap:
        sizes, backend, sampler = self._sizes, self._backend, SamplerId(f"s{seed}")
        begun = time.perf_counter()
        backend.load_sampler(sampler, backend.capture(self._model, {StatePart.WEIGHTS}))
        saved = time.perf_counter() - begun
        requests = [
            SampleRequest(
                request_id=RequestId(f"{seed}.{number}"),
                sampler=sampler,
                prompt=prompt,
                num_samples=sizes.samples,
                params=SamplingParams(seed=number, max_tokens=sizes.tokens, eos_stops=False),
                options=PromptOptions(),
            )
            for number, prompt in enumerate(sizes.prompts_of(seed))
        ]
        tokens: dict[tuple[RequestId, int], list[np.ndarray]] = {}
        logprobs: dict[tuple[RequestId, int], list[np.ndarray]] = {}
        backend.begin_sample(PreparedSampleBatch(requests=tuple(requests)))
        while deltas := backend.step_sample():
            for delta in deltas:
                tokens.setdefault((delta.request_id, delta.index), []).append(delta.tokens)
                logprobs.setdefault((delta.request_id, delta.index), []).append(delta.logprobs)
        examples: list[PassExample] = []
        for request in requests:
            for index in range(sizes.samples):
                where = request.request_id, index
                row = np.concatenate([request.prompt, *tokens[where]])
                inputs = loss_inputs(row, np.concatenate(logprobs[where]), index)
                examples.append(
                    PassExample(
                        request_id=RequestId(f"p{seed}"),
                        model_id=self._model,
                        tokens=row[:-1],
                        loss=LOSS,
                        loss_inputs=inputs,
                        loss_config={},
                    )
                )
        sampled = time.perf_counter() - begun
        backend.forward_backward(PreparedModelPassBatch(examples=tuple(examples)))
        backend.optim_step(self._model, OptimizerParams(learning_rate=LEARNING_RATE))
        trained = time.perf_counter() - begun
        backend.drop_sampler(sampler)
        return Lap(saved, sampled, trained)
