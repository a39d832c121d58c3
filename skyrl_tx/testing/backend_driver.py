"""A driver for tests that call a backend directly: it builds small requests, trains and samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, Snapshot, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.losses import LossInput
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams, PromptOptions, SamplingParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.contract.state_files import FILES

Floats = NDArray[np.float64]
Array = TypeVar("Array", bound=NDArray[Any])

STEP = OptimizerParams(learning_rate=0.05, weight_decay=0.1, grad_clip_norm=1.0)
WEIGHTS_ONLY = frozenset({StatePart.WEIGHTS})
STEP_METRICS = frozenset({"unclipped_grad_l2:mean", "learning_rate:mean", "step:max"})
"""Metrics that every optimizer step returns."""
MOST_EMPTY_STEPS = 10_000
"""Number of decode slices in a row without a token after which a test fails, because it would never end."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One complete sample."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str


@dataclass(slots=True)
class BackendDriver:
    """Calls a started backend in one test.

    `clean` frees the models and samplers that the test created, and cancels its samples.
    """

    backend: AbstractBackend
    capabilities: Capabilities
    directory: Path
    make_backend: Callable[[], AbstractBackend] | None = None
    """Makes the backend that replaces this one if `clean` fails. None means that it is not replaced."""
    _models: list[ModelId] = field(default_factory=list[ModelId])
    _samplers: list[SamplerId] = field(default_factory=list[SamplerId])
    _sample_requests: list[RequestId] = field(default_factory=list[RequestId])
    _numbers: Iterator[int] = field(default_factory=count)

    def spec(self, seed: int = 1, *, rank: int = 4) -> ModelSpec:
        """Return a model with a small adapter on all layers that the backend can train."""
        targets = self.capabilities.lora_targets
        lora = LoraSpec(
            rank=min(rank, self.capabilities.max_lora_rank),
            seed=seed,
            train_attn="attn" in targets,
            train_mlp="mlp" in targets,
            train_unembed="unembed" in targets,
        )
        return ModelSpec(lora=lora)

    def new_id(self) -> ModelId:
        """Return an id for a model that the test creates without `model`."""
        self._models.append(ModelId(f"model-{next(self._numbers)}"))
        return self._models[-1]

    def model(self, seed: int = 1, *, steps: int = 0) -> ModelId:
        """Create a model and train it for `steps` optimizer steps."""
        model_id = self.new_id()
        self.backend.create_model(model_id, self.spec(seed))
        for step in range(steps):
            self.forward_backward(self.batch(self.request(model_id, seed=step)))
            self.optim_step(model_id, STEP)
        return model_id

    def forward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """Run a forward pass. Asserts that it returns one complete result per example."""
        return _check_results(batch, self.backend.forward(batch))

    def forward_backward(self, batch: PreparedModelPassBatch) -> list[PassResult]:
        """Run a forward-backward pass. Asserts that it returns one complete result per example."""
        return _check_results(batch, self.backend.forward_backward(batch))

    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        """Take an optimizer step. Asserts that it returns the metrics that every step has."""
        metrics = self.backend.optim_step(model_id, params)
        missing = sorted(STEP_METRICS - metrics.keys())
        assert not missing, f"optim_step returned the metrics {sorted(metrics)}, and {missing} are missing"
        return metrics

    def request(
        self, model_id: ModelId, lengths: Sequence[int] = (5, 9), *, seed: int = 0, loss: str = "cross_entropy"
    ) -> list[PassExample]:
        """Return the examples of one request, with random tokens."""
        draw = np.random.default_rng(seed)
        request_id = RequestId(f"request-{next(self._numbers)}")
        return [self._example(request_id, model_id, length, draw, loss) for length in lengths]

    def batch(self, *requests: list[PassExample]) -> PreparedModelPassBatch:
        """Return a batch of these requests."""
        return PreparedModelPassBatch(examples=tuple(example for request in requests for example in request))

    def files_of(self, snapshot: Snapshot) -> dict[str, bytes]:
        """Write a snapshot and return the bytes of its safetensors files, by file name."""
        directory = self.directory / f"snapshot-{next(self._numbers)}"
        directory.mkdir()
        snapshot.write(directory)
        return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}

    def state_of(self, model_id: ModelId) -> dict[str, bytes]:
        """Return the whole state of a model as the bytes of its files, see `files_of`."""
        return self.files_of(self.backend.capture(model_id, ALL_PARTS))

    def arrays_of(self, model_id: ModelId, part: StatePart) -> dict[str, Floats]:
        """Return the tensors of one part of a model's state as float64, by name."""
        files = self.files_of(self.backend.capture(model_id, {part}))
        return {name: array.astype(np.float64) for name, array in load(files[FILES[part]]).items()}

    def distributions(self, model_id: ModelId, tokens: NDArray[np.int32]) -> Floats:
        """Return the log-probabilities of all next tokens after each of `tokens`, [T, V].

        They come from a forward pass of the trainer.
        """
        shape = (len(tokens), self.capabilities.vocab_size)
        targets = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        inputs = {"target_tokens": read_only(np.ascontiguousarray(targets)), "weights": read_only(np.ones(shape, "f4"))}
        [example] = self.request(model_id, (len(tokens),))
        example = replace(example, tokens=read_only(tokens), loss_inputs=inputs)
        [result] = self.forward(self.batch([example]))
        return result.logprobs.astype(np.float64)

    def sampler(self, model_id: ModelId) -> SamplerId:
        """Load a model's current weights as a sampler."""
        self._samplers.append(SamplerId(f"sampler-{next(self._numbers)}"))
        self.backend.load_sampler(self._samplers[-1], self.backend.capture(model_id, WEIGHTS_ONLY))
        return self._samplers[-1]

    def sample_request(
        self,
        sampler: SamplerId | None,
        *,
        num_samples: int = 1,
        params: SamplingParams | None = None,
        options: PromptOptions | None = None,
        cache_scope: str = "",
    ) -> SampleRequest:
        """Return a request with a prompt of four tokens.

        By default it asks for eight new tokens.
        """
        self._sample_requests.append(RequestId(f"request-{next(self._numbers)}"))
        return SampleRequest(
            request_id=self._sample_requests[-1],
            sampler=sampler,
            prompt=read_only(np.array([3, 1, 2, 3], np.int32)),
            num_samples=num_samples,
            params=params or SamplingParams(seed=7, max_tokens=8, eos_stops=False),
            options=options or PromptOptions(),
            cache_scope=cache_scope,
        )

    def run_samples(self, *requests: SampleRequest) -> list[SampleDelta]:
        """Run requests together to their end, and return all deltas except empty ones."""
        self.backend.begin_sample(PreparedSampleBatch(requests=requests))
        return [delta for delta in self.finish_samples() if delta.tokens.size or delta.stop_reason or delta.error]

    def finish_samples(self) -> list[SampleDelta]:
        """Run decode slices until no sample is left, and return all deltas. Asserts that this ends."""
        deltas: list[SampleDelta] = []
        num_empty = 0
        while new := self.backend.step_sample():
            deltas += new
            has_progress = any(delta.tokens.size or delta.stop_reason or delta.error for delta in new)
            num_empty = 0 if has_progress else num_empty + 1
            assert num_empty < MOST_EMPTY_STEPS, (
                f"step_sample returned {num_empty} times in a row only deltas without a token, stop reason or error, "
                f"the last one for sample {new[-1].index} of {new[-1].request_id}"
            )
        return deltas

    def draw(self, request: SampleRequest, *others: SampleRequest) -> list[Drawn]:
        """Run requests together. Returns the complete samples of the first one, in index order."""
        deltas = self.run_samples(request, *others)
        return [drawn_of(deltas, request.request_id, index) for index in range(request.num_samples)]

    def clean(self) -> None:
        """Cancel the samples of the test, and free its models and samplers."""
        if self._sample_requests:  # a backend that cannot sample yet can run the other tests
            self.backend.cancel_sample(self._sample_requests)
        for model_id in self._models:
            self.backend.delete_model(model_id)
        for sampler in self._samplers:
            self.backend.drop_sampler(sampler)

    def _example(
        self, request_id: RequestId, model_id: ModelId, length: int, draw: np.random.Generator, loss: str
    ) -> PassExample:
        spec, vocab_size = self.capabilities.losses[loss], self.capabilities.vocab_size

        def array(name: str, kind: LossInput) -> NDArray[np.int32] | NDArray[np.float32]:
            if kind.is_integer:
                return read_only(draw.integers(0, vocab_size, length, dtype=np.int32))
            if name == "logprobs":
                return read_only(-draw.random(length, np.float32) * np.float32(np.log(vocab_size)))
            return read_only(0.5 + draw.random(length, np.float32))

        return PassExample(
            request_id=request_id,
            model_id=model_id,
            tokens=read_only(draw.integers(0, vocab_size, length, dtype=np.int32)),
            loss=loss,
            loss_inputs={name: array(name, kind) for name, kind in spec.inputs.items()},
            loss_config=dict(spec.config),
        )


def _check_results(batch: PreparedModelPassBatch, results: list[PassResult]) -> list[PassResult]:
    num_results, num_examples = len(results), len(batch.examples)
    assert num_results == num_examples, f"the pass returned {num_results} results for {num_examples} examples"
    for example, result in zip(batch.examples, results, strict=True):
        shape, expected = result.logprobs.shape, example.loss_inputs["target_tokens"].shape
        assert shape == expected, f"logprobs has the shape {shape}, and target_tokens has {expected}"
        assert "loss" in result.sums, f"sums has {sorted(result.sums)}, and 'loss' is missing"
    return results


def read_only(array: Array) -> Array:
    """Return a read-only view of an array, like the arrays that the engine passes to a backend."""
    view = array.view()
    view.flags.writeable = False
    return view


def drawn_of(deltas: Sequence[SampleDelta], request_id: RequestId, index: int) -> Drawn:
    """Return one complete sample. Asserts that its last delta, and no other, has a stop reason."""
    sample_deltas = [delta for delta in deltas if delta.request_id == request_id and delta.index == index]
    assert sample_deltas, f"sample {index} of {request_id} has no delta"
    assert all(delta.error is None for delta in sample_deltas), sample_deltas
    reasons = [delta.stop_reason for delta in sample_deltas]
    assert reasons[-1] is not None and reasons[:-1] == [None] * (len(sample_deltas) - 1)
    return Drawn(
        tokens=tuple(int(token) for delta in sample_deltas for token in delta.tokens),
        logprobs=tuple(float(logprob) for delta in sample_deltas for logprob in delta.logprobs),
        stop_reason=reasons[-1],
    )


def drawn_examples(
    model_id: ModelId, *shapes: tuple[int, ...], seed: int = 0, request: str = "r", vocab_size: int = 256
) -> tuple[PassExample, ...]:
    """Return the random examples of one cross_entropy request, with targets of the given shapes."""
    draw = np.random.default_rng(seed)
    return tuple(
        PassExample(
            request_id=RequestId(request),
            model_id=model_id,
            tokens=read_only(draw.integers(0, vocab_size, shape[0], dtype=np.int32)),
            loss="cross_entropy",
            loss_inputs={
                "target_tokens": read_only(draw.integers(0, vocab_size, shape, dtype=np.int32)),
                "weights": read_only(draw.random(shape, np.float32)),
            },
            loss_config={},
        )
        for shape in shapes
    )


def scoring(model_id: ModelId, rows: Sequence[NDArray[np.int32]]) -> PreparedModelPassBatch:
    """Return a batch that scores every token of each row except the first."""
    return PreparedModelPassBatch(
        examples=tuple(
            PassExample(
                request_id=RequestId("scored"),
                model_id=model_id,
                tokens=row[:-1],
                loss="cross_entropy",
                loss_inputs={"target_tokens": row[1:], "weights": np.ones(row.size - 1, np.float32)},
                loss_config={},
            )
            for row in rows
        )
    )


def same_bits(left: PassResult, right: PassResult) -> bool:
    """Return whether two results are bit-identical."""
    return left.logprobs.tobytes() == right.logprobs.tobytes() and dict(left.sums) == dict(right.sums)


def nearly_equal(left: PassResult, right: PassResult, tolerance: float) -> bool:
    """Return whether the log-probabilities of two results differ by at most `tolerance`.

    Sums may differ by ten times the tolerance for each log-probability. With tolerance 0 the
    results must be bit-identical.
    """
    if tolerance == 0:
        return same_bits(left, right)
    if left.logprobs.shape != right.logprobs.shape or left.sums.keys() != right.sums.keys():
        return False
    near = 10 * tolerance * max(1, left.logprobs.size)
    is_near = np.allclose(left.logprobs, right.logprobs, rtol=0, atol=tolerance)
    return bool(is_near) and all(abs(value - right.sums[name]) <= near for name, value in left.sums.items())
