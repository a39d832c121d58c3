"""Decide which tokens may come next in a sample, so that its text matches a grammar.

The work for a token runs in a thread while the device decodes other samples.
"""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from skyrl_tx.contract.arrays import Uint32Array
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.logit_adjuster import pack_tokens
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.grammars.fair_threads import FairThreads
from skyrl_tx.grammars.grammar import clean_error, make_limits, write_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_THREADS, _PER_OWNER = 3, 2
_MAX_TOKEN_S = 0.5
"""How long a token may compute, because the limits of the library do not cover all of its work."""
_SOURCES = "the response format, grammar or tools"
"""The fields that constraints come from, for messages."""


class TextMatcher:
    """A `TokenConstraint` that follows one sample through a grammar."""

    def __init__(
        self,
        matcher: "LLMatcher",
        eos: Collection[int],
        stops: Collection[int],
        vocab_size: int,
        threads: FairThreads,
        owner: str,
        errors: list[UserError],
    ) -> None:
        """Begin to compute the tokens that may come first.

        `matcher` belongs to this sample and has a mask of at least `vocab_size` bits. `eos` are the
        tokens that it allows when the text is complete. Instead, `stops` are allowed. If the
        grammar exceeds a limit, the error is added to `errors` and the sample can
        only stop: an exception would interrupt the samples of other requests. `owner` is the owner
        of the request.
        """
        self._matcher = matcher
        self._threads = threads
        self._owner = owner
        self._errors = errors
        self._eos, self._stops = pack_tokens(eos, vocab_size), pack_tokens(stops, vocab_size)
        self._stop_tokens = frozenset(stops)
        self._next = threads.submit(owner, self._compute)

    def fill_mask(self, mask: Uint32Array) -> None:
        """Write the allowed tokens."""
        mask[:] = self._next.result()

    def accept(self, token: int) -> None:
        """Continue after a token, and begin to compute the tokens that may follow."""
        if token not in self._stop_tokens:  # a stop token ends the sample
            self._next = self._threads.submit(self._owner, partial(self._advance, self._next, token))

    def _advance(self, previous: "Future[Uint32Array]", token: int) -> Uint32Array:
        # A matcher is not safe for several threads. This cannot deadlock: `previous` has the same owner,
        # so it started before.
        previous.result()
        self._matcher.consume_token(token)
        return self._compute()

    def _compute(self) -> Uint32Array:
        if self._errors:  # the request fails, so its other samples need no more work
            return self._stops
        matcher, mask, began = self._matcher, np.zeros_like(self._stops), time.thread_time()
        if not matcher.is_stopped():
            mask[:] = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: mask.size] & ~self._eos
        message = clean_error(matcher.get_error()) if matcher.is_error() else ""
        if (seconds := time.thread_time() - began) > _MAX_TOKEN_S:
            message = f"a token took {seconds:.1f} s of computing, at most {_MAX_TOKEN_S:g} s are allowed"
        if message:
            self._errors.append(UserError(f"{_SOURCES} became too complex during the sample: {message}"))
            return self._stops
        if matcher.is_accepting():
            mask |= self._stops
        return mask


class GrammarCompiler:
    """Compiles constraints for the tokenizer of one model, in threads."""

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Compile nothing yet. `read_tokenizer` returns the content of `tokenizer.json`."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._threads = FairThreads(_NUM_THREADS, _PER_OWNER, "grammar")
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def begin(self, constraint: Constraint, owner: str) -> "Future[LLMatcher]":
        """Compile a constraint in a thread, for one request of an owner. The future raises UserError if this fails.

        Requests never share a compiled grammar, because the limit for the states of its lexer
        covers all copies. A sample of one request could then fail because of other requests.
        """
        return self._threads.submit(owner, partial(self._compile, constraint))

    def make_matcher(
        self, compiled: "LLMatcher", stops: Collection[int], owner: str, errors: list[UserError]
    ) -> TextMatcher:
        """Return a matcher for a new sample, which the tokens `stops` end. See `TextMatcher` for `errors`."""
        return TextMatcher(compiled.deep_copy(), self._eos, stops, self._vocab_size, self._threads, owner, errors)

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._threads.close()

    def _compile(self, constraint: Constraint) -> "LLMatcher":
        from llguidance import LLMatcher

        try:
            grammar = write_grammar(constraint)
        except ValueError as error:
            raise UserError(f"the grammar cannot be read: {error}") from error
        matcher = LLMatcher(self._load_tokenizer(), grammar, log_level=0, limits=make_limits())
        if matcher.is_error():
            raise UserError(f"{_SOURCES} cannot be used with this model: {clean_error(matcher.get_error())}")
        return matcher

    def _load_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokenizer is None:
                text = self._read_tokenizer()
                try:
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos)
                except ValueError as error:
                    raise UserError(f"{_SOURCES} cannot be used with the model's tokenizer: {error}") from error
            return self._tokenizer
