"""Checks of the grammars that clients send, and the tokens that a grammar allows."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.grammars.grammar import check_constraint
from skyrl_tx.grammars.matcher import GrammarCompiler, TextMatcher
from tests.support.child_process import run_in_own_process
from tests.support.tiny_tokenizer import PACKAGED

TEXT = (PACKAGED / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.from_str(TEXT)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS, OTHER = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")
MAX_CHECK_S = 5.0
"""A check of the largest hostile grammar may take this long on a busy machine; it is usually below 0.3 s."""


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: TEXT, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()


def start(compiler: GrammarCompiler, kind: str, text: str, errors: list[UserError] | None = None) -> TextMatcher:
    compiled = compiler.begin(Constraint(kind=kind, text=text)).result()
    return compiler.make_matcher(compiled, (OTHER,), [] if errors is None else errors)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def list_allowed(matcher: TextMatcher) -> set[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_only_continuations_of_the_text_are_allowed_and_stops_at_its_end(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, "choice", '["ab", "abc"]')
    assert {TOKENIZER.decode([token]) for token in list_allowed(matcher)} <= {"a", "ab", "abc"}
    for character in "ab":
        matcher.accept(TOKENIZER.token_to_id(character))
    allowed = list_allowed(matcher)
    assert OTHER in allowed, "the text may end"
    assert EOS not in allowed, "the sample does not stop at this token"
    matcher.accept(TOKENIZER.token_to_id("c"))
    assert list_allowed(matcher) == {OTHER}


def test_samples_of_a_request_are_independent(compiler: GrammarCompiler) -> None:
    compiled = compiler.begin(Constraint(kind="regex", text="[ab]c")).result()
    first, second = (compiler.make_matcher(compiled, (EOS,), []) for _ in range(2))
    before = list_allowed(second)
    first.accept(TOKENIZER.token_to_id("a"))
    assert list_allowed(second) == before != list_allowed(first)


def test_a_grammar_that_becomes_too_complex_stops_its_sample_only(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is reported, and the sample can only stop: an exception would interrupt other samples."""
    from llguidance import LLParserLimits  # not on import of this module, see `check_imports`

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
    assert allowed == {OTHER}


def test_a_model_without_tokenizer_is_named() -> None:
    def fail() -> str:
        raise UserError("no tokenizer")

    compiler = GrammarCompiler(fail, VOCAB_SIZE, (EOS,))
    with pytest.raises(UserError, match="no tokenizer"):
        compiler.begin(Constraint(kind="regex", text="a")).result()
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
    "long repeat": ("grammar", 'start: "a"{1000000}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_checked_soon_while_other_threads_run(name: str) -> None:
    kind, text = HOSTILE[name]
    pauses = [0.0]
    is_over = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not is_over.wait(0.005):
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    try:
        check_constraint(Constraint(kind=kind, text=text), "regex")
    except FieldError as error:
        assert error.field == "regex"
        assert len(error.message) <= 600
    finally:
        is_over.set()
        thread.join()
    assert time.monotonic() - began < MAX_CHECK_S
    assert max(pauses) < MAX_CHECK_S / 5


def check_imports(_: Path) -> None:
    import skyrl_tx.apps.chat.constraints
    import skyrl_tx.engine.constraints  # noqa: F401

    assert "llguidance" not in sys.modules


def test_the_library_is_imported_only_when_a_request_needs_it(tmp_path: Path) -> None:
    run_in_own_process(check_imports, tmp_path)
