"""Scenarios of bench_sampling that need a real server: concurrent futures, and iterations of reinforcement learning.

The time of an iteration outside the backend is found by comparison with the same work on a backend in this process,
without server, client or database. Server and backend alternate; neither works while the other does.
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
from tinker import types

from benchmarks.common import compute_quartiles, quantile
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.process.setup import raise_file_limit
from tests.support.live_server import LiveServer

LOSS = "importance_sampling"
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model, and the number and sizes of prompts and samples."""

    model: Path
    vocab_size: int
    rank: int
    prompts: int
    length: int
    samples: int
    tokens: int

    def config(self, slots: int) -> JaxConfig:
        """Return the backend configuration. The server gets the same settings as flags."""
        return JaxConfig(
            sample_slots=slots,
            max_sample_tokens=slots * 2 * (self.length + self.tokens),
            max_lora_adapters=2,
            max_sampler_adapters=4,
        )

    def make_prompts(self, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [draw.integers(2, self.vocab_size, self.length).astype(np.int32) for _ in range(self.prompts)]


@contextmanager
def run_server(sizes: Sizes, slots: int) -> Iterator[LiveServer]:
    """Run `skyrl-tx serve` in separate processes."""
    config = sizes.config(slots)
    flags = ["--base-model", str(sizes.model), "--backend", "jax"]
    for name in ("sample_slots", "max_sample_tokens", "max_lora_adapters", "max_sampler_adapters"):
        flags += [f"--backend-config.{name.replace('_', '-')}", str(getattr(config, name))]
    raise_file_limit()
    with tempfile.TemporaryDirectory() as directory, LiveServer(Path(directory), flags=flags) as server:
        yield server


def create_client(server: LiveServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key="tml-local")


def read_resident_mb(pid: int | str) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


class Statuses(logging.Handler):
    """Counts the HTTP statuses that the SDK's client logs."""

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
    """Records the peak resident memory of processes, sampled every 0.1 s."""

    def __init__(self, pids: dict[str, int | str]) -> None:
        self._pids = pids
        self.before = {name: read_resident_mb(pid) for name, pid in pids.items()}
        self.peak = dict(self.before)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(0.1):
            for name, pid in self._pids.items():
                self.peak[name] = max(self.peak[name], read_resident_mb(pid))

    def report(self) -> dict[str, str]:
        """Return megabytes before the load and at the peak."""
        return {name: f"{self.before[name]} -> {self.peak[name]}" for name in self._pids}


def measure_futures(sizes: Sizes, count: int, slots: int) -> dict[str, Any]:
    """Submit `count` futures of one client at once, while another client samples single tokens sequentially."""
    params = types.SamplingParams(max_tokens=sizes.tokens, stop=[])
    one = types.SamplingParams(max_tokens=1, stop=[])
    prompts = [types.ModelInput.from_ints(row.tolist()) for row in sizes.make_prompts(1)]

    with run_server(sizes, slots) as server, create_client(server) as service, create_client(server) as other_service:
        client, other = (
            client.create_sampling_client(base_model=str(sizes.model)).result() for client in (service, other_service)
        )

        # Warm up with all prompts.
        for warm in [client.sample(prompt, 1, params) for prompt in prompts]:
            warm.result()

        # Time first tokens without other load.
        lone: list[float] = []
        for prompt in prompts:
            lone.append(time_work(lambda prompt=prompt: other.sample(prompt, 1, one).result()))

        errors: list[str] = []
        ended: list[float] = []
        under_load: list[float] = []
        pids: dict[str, int | str] = {"API": server.pid, "engine": server.engine_pid, "client": "self"}
        with Statuses() as statuses, Peaks(pids) as peaks, ThreadPoolExecutor(64) as pool:
            start = time.perf_counter()

            def wait(future: Any) -> None:
                try:
                    assert len(future.result().sequences[0].tokens) == sizes.tokens
                except Exception as error:  # counted and reported
                    errors.append(f"{type(error).__name__}: {error}")
                ended.append(time.perf_counter() - start)

            # Sample single tokens while the futures wait.
            pending = [client.sample(prompts[index % len(prompts)], 1, params) for index in range(count)]
            submitted_s = time.perf_counter() - start
            waits = [pool.submit(wait, future) for future in pending]
            while not all(future.done() for future in waits):
                prompt = prompts[len(under_load) % len(prompts)]
                under_load.append(time_work(lambda prompt=prompt: other.sample(prompt, 1, one).result()))
            elapsed_s = time.perf_counter() - start

    return {
        "futures": count,
        "errors": len(errors),
        "first_errors": errors[:3],
        "statuses": dict(sorted(statuses.counts.items())),
        "resident_mb": peaks.report(),
        "submitted_s": round(submitted_s, 2),
        "all_s": round(elapsed_s, 2),
        "tokens_per_s": round(count * sizes.tokens / elapsed_s, 1),
        "first_result_s": round(min(ended), 2),
        "result_s": compute_quartiles(ended, 2),
        "first_token_alone_s": compute_quartiles(lone),
        "first_token_under_load_s": {**compute_quartiles(under_load), "p95": round(quantile(under_load, 0.95), 3)},
    }


def time_work(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(slots=True)
class IterationTimes:
    """Seconds from the start of an iteration to the end of each of its parts."""

    saved: float
    sampled: float
    trained: float


def measure_iterations(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Alternate iterations through the SDK and a server with the same work on a backend alone."""
    slots = sizes.prompts * sizes.samples
    times: list[tuple[IterationTimes, IterationTimes]] = []

    with run_server(sizes, slots) as server, create_client(server) as service:
        alone = BackendAlone(sizes, slots)
        training = service.create_lora_training_client(str(sizes.model), rank=sizes.rank, seed=0).result()
        for seed in range(repeats + 1):
            pair = run_through_sdk(sizes, training, seed), alone.iteration(seed)
            if seed:  # the first compiles
                times.append(pair)
        alone.close()

    parts = {"save": "saved", "until sampled": "sampled", "all": "trained"}
    return {
        **{
            f"served, {name}, s": compute_quartiles([getattr(ours, key) for ours, _ in times])
            for name, key in parts.items()
        },
        **{
            f"backend alone, {name}, s": compute_quartiles([getattr(alone, key) for _, alone in times])
            for name, key in parts.items()
        },
        "share outside the backend": compute_quartiles([1 - alone.trained / ours.trained for ours, alone in times]),
    }


def run_through_sdk(sizes: Sizes, training: tinker.TrainingClient, seed: int) -> IterationTimes:
    """Run one iteration like the training loops of the cookbook."""
    start = time.perf_counter()
    sampler = training.save_weights_and_get_sampling_client().result()
    saved = time.perf_counter() - start

    prompts = sizes.make_prompts(seed)
    pending = [
        sampler.sample(
            types.ModelInput.from_ints(prompt.tolist()),
            sizes.samples,
            types.SamplingParams(max_tokens=sizes.tokens, stop=[], seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]

    # Turn each sample into a datum.
    data: list[types.Datum] = []
    for prompt, answer in zip(prompts, pending, strict=True):
        for index, sequence in enumerate(answer.result().sequences):
            row = np.concatenate([prompt, sequence.tokens])
            inputs = make_loss_inputs(row, np.asarray(sequence.logprobs, np.float32), index)
            inputs["target_tokens"] = inputs["target_tokens"].astype(np.int64)
            data.append(
                types.Datum(model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs=dict(inputs))
            )
    sampled = time.perf_counter() - start

    passed = training.forward_backward(data, LOSS)
    stepped = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    passed.result()
    stepped.result()
    return IterationTimes(saved, sampled, time.perf_counter() - start)


def make_loss_inputs(row: np.ndarray, logprobs: np.ndarray, index: int) -> dict[str, np.ndarray]:
    """Return the loss inputs of a prompt with its continuation; the advantages are artificial."""
    before = np.zeros(row.size - 1 - logprobs.size, np.float32)
    advantages = np.full(logprobs.size, 1.0 if index % 2 else -1.0, np.float32)
    return {
        "target_tokens": row[1:].astype(np.int32),
        "logprobs": np.concatenate([before, logprobs]),
        "advantages": np.concatenate([before, advantages]),
        "weights": np.concatenate([before, np.ones_like(logprobs)]),
    }


class BackendAlone:
    """Runs the same iteration on a backend alone, with the calls that an engine would make."""

    def __init__(self, sizes: Sizes, slots: int) -> None:
        self._sizes, self._model = sizes, ModelId("m")
        self._backend = JaxBackend(str(sizes.model), sizes.config(slots))
        self._backend.start()
        self._backend.create_model(self._model, ModelSpec(lora=LoraSpec(rank=sizes.rank, seed=0)))

    def close(self) -> None:
        self._backend.close()

    def iteration(self, seed: int) -> IterationTimes:
        sizes, backend, sampler = self._sizes, self._backend, SamplerId(f"s{seed}")
        start = time.perf_counter()
        backend.load_sampler(sampler, backend.capture(self._model, {StatePart.WEIGHTS}))
        saved = time.perf_counter() - start

        requests = [
            SampleRequest(
                request_id=RequestId(f"{seed}.{number}"),
                sampler=sampler,
                prompt=prompt,
                num_samples=sizes.samples,
                params=SamplingParams(seed=number, max_tokens=sizes.tokens, eos_stops=False),
                options=PromptOptions(),
            )
            for number, prompt in enumerate(sizes.make_prompts(seed))
        ]

        tokens: dict[tuple[RequestId, int], list[np.ndarray]] = {}
        logprobs: dict[tuple[RequestId, int], list[np.ndarray]] = {}
        backend.begin_sample(PreparedSampleBatch(requests=tuple(requests)))
        while deltas := backend.step_sample():
            for delta in deltas:
                tokens.setdefault((delta.request_id, delta.index), []).append(delta.tokens)
                logprobs.setdefault((delta.request_id, delta.index), []).append(delta.logprobs)

        # Turn each sample into a training example.
        examples: list[PassExample] = []
        for request in requests:
            for index in range(sizes.samples):
                where = request.request_id, index
                row = np.concatenate([request.prompt, *tokens[where]])
                inputs = make_loss_inputs(row, np.concatenate(logprobs[where]), index)

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
        sampled = time.perf_counter() - start

        backend.forward_backward(PreparedModelPassBatch(examples=tuple(examples)))
        backend.optim_step(self._model, OptimizerParams(learning_rate=LEARNING_RATE))
        trained = time.perf_counter() - start

        backend.drop_sampler(sampler)
        return IterationTimes(saved, sampled, trained)
