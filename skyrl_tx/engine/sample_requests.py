"""A sample request in the engine: its constraint, its running samples and its output.

The backend returns the tokens of a sample in several parts, called deltas. The engine joins them,
and looks for stop strings.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import numpy as np
from msgspec import UNSET, UnsetType

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.constraints import TokenConstraint
from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import Constraint, SamplingParams
from skyrl_tx.contract.results import (
    PromptResult,
    SampleDelta,
    SampledSequence,
    SampleOutput,
    StopReason,
    TopK,
    TrainerGap,
)
from skyrl_tx.engine.metrics import SampledTokenCounts
from skyrl_tx.engine.prepare import check_sequence
from skyrl_tx.engine.request_log import QueuedRequest
from skyrl_tx.grammars import CompiledGrammar, GrammarCompiler
from skyrl_tx.store import completions
from skyrl_tx.store.database import Store

_MARGIN_CHARS = 8
"""Extra characters in the window of last tokens that is searched for stop strings.

They are needed because the window may start or end inside a character, whose bytes then decode to
up to three replacement characters, and because the tokenizer may drop a space at the start.
"""
_CHARS_PER_TOKEN = 4
"""Estimated number of characters per token, to guess how many tokens the window needs."""


class RequestConstraint:
    """The compiled constraint of one request, which makes the constraints of its samples."""

    def __init__(self, compiler: GrammarCompiler, constraint: Constraint, stops: Collection[int], owner: str) -> None:
        """Begin to compile a constraint of a request of an owner."""
        self.compiled: Future[CompiledGrammar] = compiler.begin(constraint, owner)
        self._field = constraint.field
        self._owner = owner
        self._compiler = compiler
        self._stops = stops
        self._errors: list[UserError] = []

    def __call__(self) -> TokenConstraint:
        """Return the constraint of a new sample. Raises UserError if it cannot be compiled."""
        return self._compiler.make_matcher(self.compiled.result(), self._stops, self._owner, self._errors)

    def raise_error(self) -> None:
        """Raise a FieldError if the constraint cannot be compiled, or if a sample exceeded its limits."""
        try:
            if self.compiled.done():
                self.compiled.result()
            if self._errors:
                raise self._errors[0]
        except UserError as error:
            raise FieldError(error.message, self._field) from error


class Constraints:
    """The constraints of requests that are about to start or run."""

    def __init__(self, backend: AbstractBackend, capabilities: Capabilities, store: Store) -> None:
        self._backend = backend
        self._capabilities = capabilities
        self._store = store
        self._compiler: GrammarCompiler | None = None
        self._requests: dict[RequestId, RequestConstraint] = {}

    def prepare(self, request_id: RequestId, owner: str, params: SamplingParams) -> bool:
        """Begin to compile the constraint of a request of an owner, and return whether the request can start.

        The engine wakes when the constraint is compiled. Raises UserError if this has failed.
        """
        constraint = params.active_controls.constraint
        if constraint is None:
            return True

        prepared = self._requests.get(request_id)
        if prepared is None:
            eos = self._capabilities.eos_token_ids
            if self._compiler is None:
                read = self._backend.make_tokenizer_reader()
                self._compiler = GrammarCompiler(read, self._capabilities.vocab_size, eos)
            stops = {*params.stop_token_ids, *(eos if params.eos_stops else ())}
            if not stops:
                raise UserError("response_format: the model has no token that ends a sample; send stop_token_ids")
            prepared = RequestConstraint(self._compiler, constraint, stops, owner)
            prepared.compiled.add_done_callback(lambda _: self._store.wake())
            self._requests[request_id] = prepared

        prepared.raise_error()
        return prepared.compiled.done()

    def get(self, request_id: RequestId) -> RequestConstraint | None:
        """Return the constraint of a request that was prepared, or None if it has none."""
        return self._requests.get(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Free the constraint of a request that has ended. Idempotent."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """Stop the threads that compile. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()


class SampleAssembler:
    """Joins the deltas of the samples of one request."""

    def __init__(self, request: SampleRequest, text_of: Callable[[list[int]], str]) -> None:
        """`text_of` decodes tokens to text. It is used only if the request has stop strings."""
        self.request = request
        self._sequences = [
            _Sequence(
                StopStringMatcher(
                    request.params.stop_strings, text_of, min_tokens=request.params.active_controls.min_tokens
                )
            )
            for _ in range(request.num_samples)
        ]
        self._prompt = PromptResult()

    def add(self, delta: SampleDelta) -> bool:
        """Add a delta.

        Returns True if this delta completes a stop string. The backend does not look for stop
        strings, so the caller must then stop the sample. Deltas that arrive after the end of their
        sample are dropped.
        """
        if delta.prompt is not None:
            self._prompt = delta.prompt
        return self._sequences[delta.index].add(delta)

    @property
    def num_open(self) -> int:
        """Number of samples that have not ended."""
        return sum(sequence.stop_reason is None for sequence in self._sequences)

    def count_tokens(self) -> SampledTokenCounts:
        """Return the number of tokens so far.

        All prompt tokens count from the start of the request, even while they are being computed.
        """
        num_cached = self._prompt.cache_hit_tokens
        return SampledTokenCounts(
            prompt=max(self.request.prompt.size - num_cached, 0),
            cached=num_cached,
            sampled=sum(sequence.count_tokens() for sequence in self._sequences),
        )

    def build_output(self) -> SampleOutput:
        """Return the output of all samples. All of them must have ended.

        Raises ServerError if arrays of the backend have the wrong form.
        """
        sequences = tuple(sequence.join() for sequence in self._sequences)
        for sequence in sequences:
            check_sequence(sequence)
        return SampleOutput(
            sequences=sequences,
            prompt=self._prompt,
            target_cells=self.request.options.target_cells,
        )


class _Sequence:
    """The deltas of one sample."""

    def __init__(self, matcher: "StopStringMatcher") -> None:
        self.stop_reason: StopReason | None = None
        self._matcher = matcher
        self._deltas: list[SampleDelta] = []
        self._gap: TrainerGap | UnsetType = UNSET
        self._num_dropped = 0

    def add(self, delta: SampleDelta) -> bool:
        if self.stop_reason is not None:
            return False
        if delta.tokens.size or delta.stop_reason is not None:
            self._deltas.append(delta)
        self.stop_reason = delta.stop_reason
        self._gap = delta.trainer_gap or UNSET
        num_kept = self._matcher.feed(delta.tokens.tolist())
        if num_kept is not None:
            self.stop_reason = "stop"
            self._num_dropped = len(delta.tokens) - num_kept
        return num_kept is not None

    def count_tokens(self) -> int:
        return sum(delta.tokens.size for delta in self._deltas) - self._num_dropped

    def join(self) -> SampledSequence:
        assert self.stop_reason is not None
        tokens = np.concatenate([delta.tokens for delta in self._deltas])
        logprobs = np.concatenate([delta.logprobs for delta in self._deltas])
        end = len(tokens) - self._num_dropped

        topks = [delta.topk for delta in self._deltas if delta.topk is not None]
        topk = None
        if topks:
            ids = np.concatenate([part.token_ids for part in topks])
            topk = TopK(token_ids=ids[:end], logprobs=np.concatenate([part.logprobs for part in topks])[:end])

        return SampledSequence(
            tokens=tokens[:end],
            logprobs=logprobs[:end],
            stop_reason=self.stop_reason,
            topk=topk,
            trainer_gap=self._gap,
        )


class StopStringMatcher:
    """Finds stop strings in a growing sample, even if they span multiple tokens."""

    def __init__(
        self, stop_strings: Sequence[str], text_of: Callable[[list[int]], str], *, min_tokens: int = 0
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings."""
        self._num_exempt = min_tokens
        self._stop_strings = tuple(stop_strings)
        self._text_of = text_of
        self._longest = max((len(text) for text in stop_strings), default=0)
        self._window: list[int] = []

    def feed(self, tokens: list[int]) -> int | None:
        """Add the next tokens of the sample.

        If a stop string ends among `tokens`, returns how many of `tokens` belong to the sample,
        else None. The token that completes the stop string belongs to the sample.
        """
        if not self._stop_strings:
            return None
        if self._num_exempt and tokens:
            num_exempt = min(self._num_exempt, len(tokens))
            self._num_exempt -= num_exempt
            num_kept = self.feed(tokens[num_exempt:])
            return None if num_kept is None else num_exempt + num_kept
        if self._matches(self._window + tokens):
            return next(n for n in range(1, len(tokens) + 1) if self._matches(self._window + tokens[:n]))
        self._window = self._take_tail(self._window + tokens)
        return None

    def _matches(self, tokens: list[int]) -> bool:
        text = self._text_of(tokens)
        return any(stop in text for stop in self._stop_strings)

    def _take_tail(self, tokens: list[int]) -> list[int]:
        """Return enough of the last tokens to contain the start of any later match."""
        needed = self._longest + _MARGIN_CHARS
        count = needed // _CHARS_PER_TOKEN + 1
        while count < len(tokens):
            if len(self._text_of(tokens[-count:])) >= needed:
                return tokens[-count:]
            count *= 2
        return tokens


class RunningRequest:
    """A running request. Its first `num_started` samples have been given to the backend."""

    def __init__(self, queued: QueuedRequest, assembler: SampleAssembler) -> None:
        self.queued = queued
        self.assembler = assembler
        self.num_started = 0
        self.clock_s = 0.0  # device time of its samples: the clock at their ends minus the clock at their starts
        self.first_token_at = 0.0
        self.num_streamed = Counter[int]()  # tokens that were streamed, by sample index
        request = assembler.request
        self.num_tokens = request.num_samples * (request.prompt.size + (request.params.max_tokens or 0))

    @property
    def num_left(self) -> int:
        """Number of samples that have not started."""
        return self.assembler.request.num_samples - self.num_started

    @property
    def num_open(self) -> int:
        """Number of samples that have started but not ended."""
        return self.assembler.num_open - self.num_left

    def take_partial(self, delta: SampleDelta) -> completions.Partial:
        """Return the new tokens of a streamed sample, for clients."""
        start = self.num_streamed[delta.index]
        self.num_streamed[delta.index] += delta.tokens.size
        return completions.Partial(
            request_id=delta.request_id,
            sample_index=delta.index,
            start=start,
            tokens=delta.tokens,
            logprobs=delta.logprobs,
            topk=delta.topk,
        )
