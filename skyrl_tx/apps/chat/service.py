"""Start sample requests for the OpenAI and Anthropic endpoints, and for the console's playground.

Callers pass a `ChatRequest` to `ChatService.start`, and then read the new tokens and texts from the
`deltas` of the `Generation` that it returns.
"""

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from http import HTTPStatus
from typing import cast

import numpy as np
from msgspec import UNSET

from skyrl_tx.apps.chat.generation import CANCELLED, Generation, PartialStreams, find_sample_pause, make_refusal
from skyrl_tx.apps.chat.models import Weights
from skyrl_tx.apps.chat.response_template import ResponseTemplate
from skyrl_tx.apps.chat.text import ContextTooLong, ModelText, SampleText
from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.numbers import MAX_SAMPLES
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.server.context import ApiContext
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.routes import sampling
from skyrl_tx.server.submission import submission
from skyrl_tx.server.submission.submission import Submission
from skyrl_tx.server.submission.validation import require
from skyrl_tx.store import completions, engine_state, futures, sessions
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
_RETRY_HEADERS = {"Retry-After": "5"}
_MAX_LIMITS_AGE_S = 2.0
_MAX_CONTEXT = 2**17
"""Limits the length of prompts until an engine has published its own limit."""
_MAX_LOGPROBS = 2**20
"""Upper bound on the log-probabilities in one response, which take about 80 MB as JSON."""
_MAX_TOTAL_SAMPLES = 4096
"""Upper bound on the samples of one API call, over all its prompts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and properties of the engine, which it writes to the database when it starts.

    The defaults apply until an engine has started for the first time.
    """

    max_context_length: int | None = None
    max_topk: int = 0
    """How many of the most likely tokens a request may ask for at each position."""
    eos_token_ids: frozenset[int] = frozenset()
    fingerprint: str = ""
    """The `system_fingerprint` of OpenAI's API. If it changes, the last bits of results may change."""
    sampling_controls: frozenset[str] | None = None
    """The fields of `SamplingControls` that the backend supports; None until an engine has started."""


def _read_limits(store: Store) -> Limits:
    state = store.read(engine_state.get)
    if state is None or not state.capabilities:
        return Limits()
    published = state.capabilities
    fingerprint = json.dumps(published.get("fingerprint", {}), sort_keys=True).encode()
    return Limits(
        max_context_length=cast(int | None, published.get("max_context_length")),
        max_topk=cast(int, published.get("max_topk_logprobs", 0)),
        eos_token_ids=frozenset(cast(list[int], published.get("eos_token_ids", []))),
        sampling_controls=frozenset(cast(list[str], published.get("sampling_controls", []))),
        fingerprint=f"fp_{hashlib.sha256(fingerprint).hexdigest()[:12]}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A prompt, and the options for sampling from it."""

    weights: Weights
    prompt: Sequence[int]
    """The tokens of the prompt."""
    params: SamplingParams
    options: PromptOptions = field(default_factory=PromptOptions)
    num_samples: int = 1
    is_streamed: bool = False
    keep_stop: bool = False
    """Whether the text includes the stop string or stop token that ended the sample."""
    skip_special: bool = True
    """Whether special tokens are left out of the text."""
    delimiters: Collection[str] = ()
    """Special tokens that `skip_special` keeps, because they separate the parts of a message."""
    needs_text: bool = True
    """Whether the request fails if the model has no tokenizer. If False, the text is empty instead."""
    is_private: bool = False
    """If True, the console does not show these samples among the samples of the run."""
    kind: str = sessions.OPENAI
    """The name of the session that the server creates for these requests, for example "Playground"."""


class ChatService:
    """Starts sample requests in the API process. There is one service per application."""

    def __init__(self, context: ApiContext) -> None:
        settings = context.settings
        self.context = context
        self.text = ModelText(settings)
        self._limits = Limits()
        self._limits_read_at = float("-inf")
        self._limits_lock = threading.Lock()
        self.streams = PartialStreams(context.store, settings.max_streams)
        context.results.add_reader(self.streams.read)
        self._cancel_unread_calls()

    def _cancel_unread_calls(self) -> None:
        """Cancel the open requests that earlier API processes submitted before they ended.

        Only the process that submitted such a request can read its result. If another API process
        is running, the requests may belong to it, and nothing is cancelled.
        """
        store, failure = self.context.store, codec.encode(CANCELLED)

        def report(written: Future[int]) -> None:
            if (error := written.exception()) is not None:
                _log.warning("cannot cancel the calls of an API process that has ended: %s", error)
            elif num_cancelled := written.result():
                _log.info("cancelled %d calls of an API process that has ended", num_cancelled)

        if store.is_alone():
            written = store.write_soon(lambda tx: completions.cancel_unread_calls(tx, failure, time.time()))
            written.add_done_callback(report)

    @property
    def limits(self) -> Limits:
        """The engine's limits. Reads the database at most once every two seconds. Thread-safe."""
        with self._limits_lock:
            if time.monotonic() - self._limits_read_at >= _MAX_LIMITS_AGE_S:
                self._limits = _read_limits(self.context.store)
                self._limits_read_at = time.monotonic()
            return self._limits

    @cached_property
    def response_template(self) -> ResponseTemplate | None:
        """The response template of the model, or None if it has none or transformers is too old for it."""
        description = self.text.response_template
        try:
            return None if description is None else ResponseTemplate(description, self.text.special_tokens)
        except ImportError:
            return None

    async def start_all(self, caller: Principal, chat_requests: Sequence[ChatRequest]) -> list[Generation]:
        """Submit the requests of one API call. If one of them is refused, all of them are cancelled.

        Raises ApiError or UserError if a request is refused. The caller must read the generations to
        their end or close them.
        """
        # Refuse the call if the engine is down or the caller has used up a quota
        report = await self.context.engine.get_recent_report()
        if report.problem is not None:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, report.problem, _RETRY_HEADERS)
        if (pause := find_sample_pause(report.pauses, caller.owner)) is not None:
            raise make_refusal(pause)

        # Check the number of samples
        total = sum(request.num_samples for request in chat_requests)
        limit = min(_MAX_TOTAL_SAMPLES, MAX_SAMPLES)
        require(
            1 <= total <= limit,
            f"n: the request asks for {total} samples over all its prompts, but must have between 1 and {limit}",
            field="n",
        )

        # Submit all requests
        started: list[Generation] = []
        try:
            for request in chat_requests:
                started.append(await self._start(caller, request))
        except BaseException:
            for generation in started:
                generation.close()
            raise
        return started

    async def _start(self, caller: Principal, request: ChatRequest) -> Generation:
        context, key = self.context, f"chat/{secrets.token_hex(16)}"
        streams = self.streams if request.is_streamed and not request.options.wants_prompt else None
        generation = Generation(context, caller, futures.make_request_id(key), streams)
        try:
            submit = partial(self._submit, caller, request, key, is_streamed=generation.is_streamed)
            generation.begin(await context.run_call(caller.owner, submit))
        except BaseException:
            generation.release()
            raise
        return generation

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Encode a prompt. Raises ContextTooLong for a text that cannot fit into the context.

        This is checked before the text is encoded, from the smallest number of tokens that a text
        of this length can have. Encoding takes a second and 150 MB per million characters.
        """
        limit = self.limits.max_context_length or _MAX_CONTEXT
        num_tokens = self.text.count_min_tokens(text)
        if num_tokens > limit:
            raise ContextTooLong(num_tokens, None, limit, is_minimum=True)
        return self.text.encode(text, add_special=add_special)

    def limit_tokens(self, num_prompt: int, max_tokens: int) -> int:
        """Return the smaller of `max_tokens` and the space after a prompt.

        Raises ContextTooLong if there is no space.
        """
        limit = self.limits.max_context_length
        if limit is None:
            return max_tokens
        if num_prompt >= limit:
            raise ContextTooLong(num_prompt, None, limit)
        return min(max_tokens, limit - num_prompt)

    def _check_length(self, request: ChatRequest) -> None:
        """Raise ContextTooLong if a prompt and its new tokens do not fit into the context.

        If `max_tokens` is None, there must be space for one new token.
        """
        limit, num_prompt, max_tokens = self.limits.max_context_length, len(request.prompt), request.params.max_tokens
        if limit is not None and num_prompt + (1 if max_tokens is None else max_tokens) > limit:
            raise ContextTooLong(num_prompt, max_tokens, limit)

    def check_sizes(self, chat_requests: Sequence[ChatRequest], *, has_token_logprobs: bool) -> None:
        """Raise ContextTooLong or UserError if a prompt is too long, or a response may have too many log-probabilities.

        `has_token_logprobs` tells whether the response has log-probabilities of sampled tokens. The
        log-probabilities of prompts are counted in any case.
        """
        for request in chat_requests:
            self._check_length(request)

        total = 0
        for request in chat_requests:
            num_prompt, options = len(request.prompt), request.options
            rest = max((self.limits.max_context_length or 0) - num_prompt, 0)
            max_tokens = rest if request.params.max_tokens is None else request.params.max_tokens
            if has_token_logprobs:
                total += request.num_samples * max_tokens * (1 + options.sample_topk)
            if options.logprobs:
                total += request.num_samples * num_prompt * (1 + options.topk)
        require(
            total <= _MAX_LOGPROBS,
            f"logprobs: the response could have {total} log-probabilities, including the most likely tokens, but may "
            f"have at most {_MAX_LOGPROBS}; ask for fewer tokens (max_tokens), samples, or most likely tokens",
            field="logprobs",
        )

    def _submit(self, caller: Principal, request: ChatRequest, key: str, *, is_streamed: bool) -> list[SampleText]:
        """Store the request, and return the texts of its samples, which are still empty.

        Runs in a thread.
        """
        self._check_length(request)
        texts = self._create_texts(request)
        store, admission = self.context.store, self.context.admission
        prompt = np.asarray(request.prompt, np.int32)
        constraint = request.params.active_controls.constraint
        num_bytes = prompt.nbytes + (0 if constraint is None else len(constraint.text))
        self.context.stored_bytes.add(caller.owner, num_bytes)

        def queue() -> tuple[Submission, futures.SubmittedRequest | None]:
            row = sampling.find_or_create_sampling_session(
                store, caller, request.kind, request.weights.base_model, request.weights.path
            )

            # Build the request for the engine. `as_sent` does not contain which kind of
            # log-probabilities the server is configured to return.
            as_sent = requests.Sample(
                prompt=prompt,
                num_samples=request.num_samples,
                sampler=row.sampler_id,
                params=request.params,
                options=request.options,
                is_private=request.is_private or UNSET,
            )
            params = sampling.set_logprobs(request.params, self.context.settings.sampled_logprobs)
            complete = as_sent if params is request.params else replace(as_sent, params=params)
            sample = Submission.from_request(complete, as_sent=as_sent)

            # Write the request to the database, for the engine that admission chooses
            engine = admission.choose_engine(row.sampling_session_id)
            return sample, store.write(
                lambda tx: submission.submit_to_sampler(
                    tx, row, caller.owner, None, key, sample, is_streamed=is_streamed, engine=engine
                )
            )

        with admission.reserve(caller.owner, num_bytes):
            sample, submitted = queue()
            while submitted is None:  # the session ended between its lookup and the submission
                sample, submitted = queue()
        admission.record(caller.owner, submitted, len(sample.body))
        return texts

    def _create_texts(self, request: ChatRequest) -> list[SampleText]:
        """Return one empty text per sample.

        Raises UserError if text is needed and the model has no tokenizer.
        """
        if request.needs_text:
            self.text.check()
        has_text = self.text.has_tokenizer
        hides_special = has_text and request.skip_special
        hidden = self.text.find_hidden_tokens(request.delimiters) if hides_special else frozenset[int]()
        stop_tokens = frozenset(request.params.stop_token_ids)
        if request.params.eos_stops:
            stop_tokens |= self.limits.eos_token_ids

        return [
            SampleText(
                self.text.decode if has_text else lambda tokens: "",
                stops=request.params.stop_strings,
                stop_tokens=stop_tokens,
                keep_stop=request.keep_stop,
                hidden=hidden,
                min_tokens=request.params.active_controls.min_tokens,
            )
            for _ in range(request.num_samples)
        ]
