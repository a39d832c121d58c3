"""The tokens that a `TextMatcher` allows."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import Constraint
from skyrl_tx.grammars import GrammarCompiler, TextMatcher, compute_mask
from tests.support.child_process import run_in_own_process
from tests.support.tiny_tokenizer import PACKAGED

TOKENIZER_JSON = (PACKAGED / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS, STOP_TOKEN = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")
OWNER = "ann"


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
    monkeypatch.setattr("skyrl_tx.grammars.make_limits", lambda: limits)
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
    monkeypatch.setattr("skyrl_tx.grammars._MAX_TOKEN_S", 0.0)
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

    monkeypatch.setattr("skyrl_tx.grammars.compute_mask", compute_late)
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


def check_imports(_: Path) -> None:
    import skyrl_tx.apps.chat.reply_grammars
    import skyrl_tx.engine.sample_requests  # noqa: F401

    assert "llguidance" not in sys.modules


def test_the_library_is_imported_only_when_a_request_needs_it(tmp_path: Path) -> None:
    run_in_own_process(check_imports, tmp_path)
