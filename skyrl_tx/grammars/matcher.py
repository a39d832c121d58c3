"""Decide which tokens may come next in a sample, so that its text matches a grammar.

The work for a token runs in a thread while the device decodes other samples.
"""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from skyrl_tx.contract.arrays import Uint32Array
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.logit_adjuster import pack_tokens
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.grammars.grammar import FairThreads, clean_error, make_limits, write_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_THREADS, _PER_OWNER = 3, 2
_MAX_TOKEN_S = 0.5
"""How long a token may compute, because the limits of the library do not cover all of its work."""
_SOURCES = "the response format, grammar or tools"
"""The fields that constraints come from, for messages."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at the start of a text, for all samples of a request."""

    matcher: "LLMatcher"
    """Never advances; samples continue with copies."""
    first: Uint32Array
    """The mask of the tokens that may come first, without end-of-text tokens."""
    may_end: bool
    """Whether an empty text is complete."""


class TextMatcher:
    """A `TokenConstraint` that follows one sample through a grammar."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        eos: Uint32Array,
        stops: Collection[int],
        vocab_size: int,
        threads: FairThreads,
        owner: str,
        errors: list[UserError],
    ) -> None:
        """Start before the first token.

        `eos` is the mask of the tokens that the grammar allows when the text is complete. Instead,
        `stops` are allowed. If the grammar exceeds a limit, the error is added to `errors` and the
        sample can only stop: an exception would interrupt the samples of other requests. `owner` is
        the owner of the request.
        """
        self._compiled = compiled
        self._matcher: LLMatcher | None = None  # copied when it first advances
        self._threads = threads
        self._owner = owner
        self._errors = errors
        self._eos, self._stops = eos, pack_tokens(stops, vocab_size)
        self._stop_tokens = frozenset(stops)
        self._next: Future[Uint32Array] = Future()
        self._next.set_result(compiled.first | self._stops if compiled.may_end else compiled.first)

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` seconds, and return whether the next mask is computed."""
        return self._next.done() or (timeout_s > 0 and bool(wait([self._next], timeout_s).done))

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
        if self._errors:  # the request fails, so its other samples need no more work
            return self._stops

        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        self._matcher.consume_token(token)
        try:
            mask, may_end = compute_mask(self._matcher, self._eos)
        except UserError as error:
            self._errors.append(error)
            return self._stops
        return mask | self._stops if may_end else mask


def compute_mask(matcher: "LLMatcher", eos: Uint32Array) -> tuple[Uint32Array, bool]:
    """Return the mask of the tokens that may come next, without the mask `eos`, and whether the text may end.

    Raises UserError if the grammar exceeds a limit.
    """
    mask, began = np.zeros_like(eos), time.thread_time()
    if not matcher.is_stopped():
        mask[:] = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: mask.size] & ~eos
    message = clean_error(matcher.get_error()) if matcher.is_error() else ""
    if (seconds := time.thread_time() - began) > _MAX_TOKEN_S:
        message = f"a token took {seconds:.1f} s of computing, at most {_MAX_TOKEN_S:g} s are allowed"
    if message:
        raise UserError(f"{_SOURCES} became too complex: {message}")
    return mask, matcher.is_accepting()


class GrammarCompiler:
    """Compiles constraints for the tokenizer of one model, in threads."""

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Compile nothing yet. `read_tokenizer` returns the content of `tokenizer.json`."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._eos_mask = pack_tokens(eos_token_ids, vocab_size)
        self._threads = FairThreads(_NUM_THREADS, _PER_OWNER, "grammar")
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def begin(self, constraint: Constraint, owner: str) -> Future[CompiledGrammar]:
        """Compile a constraint in a thread, for one request of an owner. The future raises UserError if this fails.

        Requests never share a compiled grammar, because the limit for the states of its lexer
        covers all copies. A sample of one request could then fail because of other requests.
        """
        return self._threads.submit(owner, partial(self._compile, constraint))

    def make_matcher(
        self, compiled: CompiledGrammar, stops: Collection[int], owner: str, errors: list[UserError]
    ) -> TextMatcher:
        """Return a matcher for a new sample, which the tokens `stops` end. See `TextMatcher` for `errors`."""
        return TextMatcher(compiled, self._eos_mask, stops, self._vocab_size, self._threads, owner, errors)

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._threads.close()

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        from llguidance import LLMatcher

        try:
            grammar = write_grammar(constraint)
        except ValueError as error:
            raise UserError(f"the grammar cannot be read: {error}") from error
        matcher = LLMatcher(self._load_tokenizer(), grammar, log_level=0, limits=make_limits())
        if matcher.is_error():
            raise UserError(f"{_SOURCES} cannot be used with this model: {clean_error(matcher.get_error())}")
        return CompiledGrammar(matcher, *compute_mask(matcher, self._eos_mask))

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
