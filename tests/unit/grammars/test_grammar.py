"""Tests of `check_constraint`, which refuses bad grammars, and of the tokens that a `TextMatcher` allows."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.grammars import grammar
from skyrl_tx.grammars.grammar import check_constraint
from skyrl_tx.grammars.matcher import GrammarCompiler, TextMatcher, compute_mask
from tests.support.child_process import run_in_own_process
from tests.support.tiny_tokenizer import PACKAGED

TOKENIZER_JSON = (PACKAGED / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS, STOP_TOKEN = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")
OWNER = "ann"
MAX_CHECK_S = 5.0
"""A check of the largest hostile grammar may take this many CPU seconds; it usually takes less than 0.3."""


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: TOKENIZER_JSON, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()


def start(compiler: GrammarCompiler, kind: str, text: str, errors: list[UserError] | None = None) -> TextMatcher:
    compiled = compiler.begin(Constraint(kind=kind, text=text), OWNER).result()
    return compiler.make_matcher(compiled, (STOP_TOKEN,), OWNER, [] if errors is None else errors)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def list_allowed(matcher: TextMatcher) -> set[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_tokens_that_continue_the_text_are_allowed_and_stop_tokens_at_its_end(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, "choice", '["ab", "abc"]')
    assert {TOKENIZER.decode([token]) for token in list_allowed(matcher)} <= {"a", "ab", "abc"}
    for character in "ab":
        matcher.accept(TOKENIZER.token_to_id(character))
    allowed = list_allowed(matcher)
    assert STOP_TOKEN in allowed, "the text may end"
    assert EOS not in allowed, "it is not a stop token of this sample"
    matcher.accept(TOKENIZER.token_to_id("c"))
    assert list_allowed(matcher) == {STOP_TOKEN}


def test_samples_of_a_request_are_independent(compiler: GrammarCompiler) -> None:
    compiled = compiler.begin(Constraint(kind="regex", text="[ab]c"), OWNER).result()
    first, second = (compiler.make_matcher(compiled, (EOS,), OWNER, []) for _ in range(2))
    before = list_allowed(second)
    first.accept(TOKENIZER.token_to_id("a"))
    assert list_allowed(second) == before != list_allowed(first)


def test_a_grammar_that_becomes_too_complex_stops_its_sample_only(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher records the error and then allows only stop tokens.

    It raises no exception, because that would interrupt the samples of other requests.
    """
    from llguidance import LLParserLimits  # imported here, because other tests must start without this package

    limits = LLParserLimits(max_lexer_states=30, verbose_errors=False)
    monkeypatch.setattr("skyrl_tx.grammars.matcher.make_limits", lambda: limits)
    errors: list[UserError] = []
    matcher = start(compiler, "regex", "[ab]*a[ab]{14}c", errors)
    allowed = list_allowed(matcher)
    for step in range(60):
        if errors:
            break
        matcher.accept(TOKENIZER.token_to_id("ab"[step * step % 3 % 2]))
        allowed = list_allowed(matcher)
    assert ["too complex" in error.message for error in errors] == [True]
    assert allowed == {STOP_TOKEN}


def test_a_token_that_takes_too_long_stops_its_sample(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[UserError] = []
    matcher = start(compiler, "regex", "[ab]*", errors)
    monkeypatch.setattr("skyrl_tx.grammars.matcher._MAX_TOKEN_S", 0.0)
    matcher.accept(TOKENIZER.token_to_id("a"))
    assert list_allowed(matcher) == {STOP_TOKEN}
    assert ["a token took" in error.message for error in errors] == [True]
    with pytest.raises(UserError, match="a token took"):  # the first token of another request
        start(compiler, "regex", "[ab]*")


def test_a_mask_is_ready_when_it_is_computed(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = start(compiler, "regex", "[ab]*")
    assert matcher.is_ready(), "the first mask is computed with the grammar"

    may_compute = threading.Event()

    def compute_late(*arguments: Any) -> Any:
        may_compute.wait()
        return compute_mask(*arguments)

    monkeypatch.setattr("skyrl_tx.grammars.matcher.compute_mask", compute_late)
    matcher.accept(TOKENIZER.token_to_id("a"))
    assert not matcher.is_ready() and not matcher.is_ready(0.001)
    may_compute.set()
    assert matcher.is_ready(timeout_s=60)


def test_a_tokenizer_error_fails_the_request_with_the_same_message() -> None:
    def fail() -> str:
        raise UserError("no tokenizer")

    compiler = GrammarCompiler(fail, VOCAB_SIZE, (EOS,))
    with pytest.raises(UserError, match="no tokenizer"):
        compiler.begin(Constraint(kind="regex", text="a"), OWNER).result()
    compiler.close()


def make_chain(size: int) -> str:
    """Return a grammar whose texts have up to 2^size characters."""
    rules = [f"x{n} ::= x{n + 1} x{n + 1} | [a-z]" for n in range(size)]
    return "\n".join(["root ::= x0", *rules, f'x{size} ::= "b"'])


HOSTILE = {
    "repeats": ("regex", "(a{1000}){1000}"),
    "classes": ("regex", r"[\w\d\s\p{L}]" * 600),
    "states": ("regex", "(.*a.{500}b){50}"),
    "alternatives": ("regex", "|".join(f"[a-z]{{{n},{n * 7}}}x" for n in range(1, 400))),
    "parentheses": ("regex", "(" * 4000 + "a" + ")" * 4000),
    "properties": (
        "json_schema",
        json.dumps({"properties": {f"key{n}": {"type": "string"} for n in range(2000)}, "required": ["key7"]}),
    ),
    "items": ("json_schema", '{"type": "array", "items": {"const": "a"}, "minItems": 1000000000}'),
    "recursion": ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    "choices": ("choice", json.dumps([f"choice number {n}" for n in range(1000)])),
    "rules": ("grammar", make_chain(500)),
    "groups": ("grammar", "root ::= " + "(" * 8000 + '"a"' + ")" * 8000),
    "ambiguous": ("grammar", 'start: e\ne: e e | e e e | "a" | ""'),
    "remainders": ("json_schema", '{"type": "integer", "multipleOf": 3000017}'),
    "common remainders": ("json_schema", '{"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 0.83}]}'),
    "inner remainders": ("grammar", 'start: "a" %json {"type": "integer", "multipleOf": 3000017}'),
    "long repeat": ("grammar", 'start: "a"{1000000}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_checked_quickly_and_does_not_block_other_threads(name: str) -> None:
    """Time is CPU time, because other processes may use the cores."""
    kind, text = HOSTILE[name]
    pauses = [0.0]
    is_over = threading.Event()

    def tick() -> None:
        last = time.process_time()
        while not is_over.wait(0.005):
            now = time.process_time()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.process_time()
    try:
        check_constraint(Constraint(kind=kind, text=text), "regex", OWNER)
    except FieldError as error:
        assert error.field == "regex"
        assert len(error.message) <= 600
    finally:
        is_over.set()
        thread.join()
    assert time.process_time() - began < MAX_CHECK_S
    assert max(pauses) < MAX_CHECK_S / 5


@pytest.mark.parametrize(
    ("values", "is_supported"),
    [
        ([0.01, 0.1, 0.25, 5, 10, 12, 1000, 1e6], True),
        ([7, 9973], False),
        ([9999], True),
        ([10001], False),
        ([10001e-7], False),
        ([97, 89, 83], False),
    ],
)
def test_values_of_multiple_of_with_a_large_sum_or_common_multiple_are_refused(
    values: list[float], is_supported: bool
) -> None:
    parts = {f"p{n}": {"type": "number", "multipleOf": value} for n, value in enumerate(values)}
    constraint = Constraint(kind="json_schema", text=json.dumps({"properties": parts}))
    if is_supported:
        check_constraint(constraint, "schema", OWNER)
    else:
        with pytest.raises(FieldError, match="schema: its values of multipleOf"):
            check_constraint(constraint, "schema", OWNER)


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_tx.grammars.grammar._MAX_CHECK_S", 0.0)
    with pytest.raises(FieldError, match="field: is too complex"):
        # No other test has this text: the results of checks are cached.
        check_constraint(Constraint(kind="regex", text="a grammar of this test alone"), "field", OWNER)


def test_a_slow_check_does_not_delay_checks_of_other_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    write, is_over = grammar.write_grammar, threading.Event()

    def write_slowly(constraint: Constraint) -> str:
        assert not constraint.text.startswith("slow") or is_over.wait(60)
        return write(constraint)

    monkeypatch.setattr(grammar, "write_grammar", write_slowly)
    with ThreadPoolExecutor() as pool:
        slow = [
            pool.submit(check_constraint, Constraint(kind="regex", text=f"slow {n}"), "regex", "ann") for n in range(4)
        ]
        try:
            # No other test has this text: the results of checks are cached.
            check_constraint(Constraint(kind="regex", text="a text of this test alone"), "regex", "bob")
            assert not any(future.done() for future in slow)
        finally:
            is_over.set()
        assert [future.result(60) for future in slow] == [None] * 4


def check_imports(_: Path) -> None:
    import skyrl_tx.apps.chat.reply_grammars
    import skyrl_tx.engine.constraints  # noqa: F401

    assert "llguidance" not in sys.modules


def test_the_library_is_imported_only_when_a_request_needs_it(tmp_path: Path) -> None:
    run_in_own_process(check_imports, tmp_path)
