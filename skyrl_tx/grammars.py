"""Grammars that sampled text has to match: JSON schemas, regular expressions and EBNF, with `llguidance`.

A constraint of the contract has a kind and a text:

- "json_schema": a JSON schema
- "regex": a regular expression in the syntax of Rust's `regex`, which must match the whole text
- "choice": a JSON list of texts
- "grammar": EBNF as in llama.cpp (GBNF), or a Lark grammar
- "lark": a grammar that this server has made, for example for tool calls

The library computes in Rust, without Python's interpreter lock, and its work is limited by
`make_limits`, so a hostile grammar takes at most a fraction of a second. It runs in threads that
owners share, so the work of one owner does not delay the work of another for long. The work for a
token runs in such a thread while the device decodes other samples.
"""

import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from skyrl_tx.contract.arrays import Uint32Array
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.logit_adjuster import pack_tokens
from skyrl_tx.contract.requests import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")
_NUM_THREADS, _PER_OWNER = 3, 2
_MAX_TOKEN_S = 0.5
"""How long a token may compute, because the limits of the library do not cover all of its work."""
_SOURCES = "the response format, grammar or tools"
"""The fields that constraints come from, for messages."""
_MAX_ERROR_CHARS = 500
_SPACE = r"( |\n[ \t]{0,40})?"
"""White space between the parts of JSON: none, a space, or a line break and an indentation.

It is limited, or a model might never end it.
"""
_HEAD = '%llguidance {"no_forcing": true}\n'
"""Without this option the library looks for tokens that must follow, which can take seconds."""
_SOURCE_LINES = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
_POSITION = re.compile(
    r"^(at )?\d+\(\d+\): |failed to compile JSON schema: |<non-verbose/>|^lexer error: |^parser error: "
)


class FairThreads:
    """Runs work in threads. Owners take turns, and the work of one owner never uses all threads.

    The work of an owner starts in the order of its submission. A thread ends when it finds no work.
    """

    def __init__(self, max_threads: int, per_owner: int, name: str) -> None:
        """Start no thread yet. One owner uses at most `per_owner` of the threads at a time."""
        self._max_threads = max_threads
        self._per_owner = per_owner
        self._name = name
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """The work that has not started, by owner. The owner whose last turn is longest ago comes first."""

    def submit(self, owner: str, work: Callable[[], T]) -> "Future[T]":
        """Run `work` in a thread, and return the future of its result."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
            if self._num_running[owner] < self._per_owner and self._num_threads < self._max_threads:
                self._num_threads += 1
                threading.Thread(target=self._run_waiting, name=self._name).start()
        return future

    def close(self) -> None:
        """Cancel the work that has not started. Idempotent."""
        with self._lock:
            waiting = [future for queue in self._waiting.values() for future, _ in queue]
            self._waiting.clear()
        for future in waiting:
            future.cancel()

    def _run_waiting(self) -> None:
        """Run work until there is none, or the owners of all of it use their threads, which then run it."""
        owner = None
        while True:
            with self._lock:
                # Count the end of the last work here, because another submission must find this thread or its work
                if owner is not None:
                    self._num_running[owner] -= 1
                owner = next((name for name in self._waiting if self._num_running[name] < self._per_owner), None)
                if owner is None:
                    self._num_running += Counter()  # forgets owners without work
                    self._num_threads -= 1
                    return

                # Put the owner behind all other owners
                queue = self._waiting.pop(owner)
                future, work = queue.popleft()
                if queue:
                    self._waiting[owner] = queue
                self._num_running[owner] += 1

            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # whoever waits for the result gets it
                    future.set_exception(error)


def write_json_rule(schema: Mapping[str, object]) -> str:
    """Return the right side of a rule that matches JSON by a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _SPACE}})}"


def write_text(text: str) -> str:
    """Return the right side of a rule that matches one text."""
    return json.dumps(text, ensure_ascii=False)


def make_grammar(start: str, rules: Mapping[str, str] | None = None) -> str:
    """Return a Lark grammar. `start` is the right side of the first rule, and `rules` names more rules."""
    lines = [f"{name}: {rule}" for name, rule in {"start": start, **(rules or {})}.items()]
    return _HEAD + "\n".join(lines)


def write_rule(constraint: Constraint) -> str:
    """Return the right side of a rule that matches a constraint of any kind but "grammar" and "lark"."""
    match constraint.kind:
        case "json_schema":
            return write_json_rule(json.loads(constraint.text))
        case "regex":
            from llguidance import regex_to_lark

            return f"/{regex_to_lark(constraint.text, use_ascii='')}/"
        case "choice":
            return " | ".join(write_text(text) for text in json.loads(constraint.text))
        case _:
            raise AssertionError(constraint.kind)


def write_grammar(constraint: Constraint) -> str:
    """Return the grammar of a constraint for the library. Raises ValueError if EBNF is malformed."""
    match constraint.kind:
        case "lark":
            return constraint.text
        case "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                text = any_to_lark(constraint.text)
            except Exception as error:  # the library raises Exception itself
                raise ValueError(str(error)) from error
            return _HEAD + re.sub(r"(?m)^\s*%llguidance\b.*$", "", text)
        case _:
            return make_grammar(write_rule(constraint))


@cache
def make_limits() -> "LLParserLimits":
    """Return limits for the work and memory of one grammar.

    A token takes at most about 50 ms, and the states of a lexer about 50 MB.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def clean_error(error: str) -> str:
    """Return a message of the library without positions in a text that the client has not written."""
    message = _POSITION.sub("", _POSITION.sub("", _SOURCE_LINES.sub("", error).strip())).strip()
    if message.startswith("oneOf constraints"):
        return "oneOf is supported only if its alternatives exclude each other by their types or constants; use anyOf"
    if "regex parse error" in message:
        message = f"regular expression: {message.rpartition('error: ')[2]}"
    return message.replace("Unimplemented keys: ", "this server does not support the keywords ")[:_MAX_ERROR_CHARS]


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
