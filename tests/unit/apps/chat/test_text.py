"""Incremental decoding equals decoding at once, and holds back possible stop strings."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from skyrl_tx.apps.chat.text import Detokenizer, ModelText, SampleText, StopStrings
from skyrl_tx.server.settings import ApiSettings
from tests.support.tiny_tokenizer import PACKAGED, VOCAB_SIZE


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))


@cache
def special_tokens() -> frozenset[int]:
    return frozenset(number for number, token in tokenizer().get_added_tokens_decoder().items() if token.special)


def decode(tokens: Sequence[int], *, skip_special: bool = False) -> str:
    return tokenizer().decode(list(tokens), skip_special_tokens=skip_special)


@cache
def byte_fallback_tokenizer() -> Tokenizer:
    """Return a byte-fallback tokenizer like in Llama 2 and Gemma, with one token per byte of rare characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "é", "日", "▁Hello"]
    made = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def decode_byte_fallback(tokens: Sequence[int]) -> str:
    return byte_fallback_tokenizer().decode(list(tokens), skip_special_tokens=False)


SLICES = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6), max_size=12)
"""Arbitrary tokens. Many of them are parts of characters."""


@given(slices=SLICES, skip_special=st.booleans())
def test_pieces_join_to_the_whole_text(slices: list[list[int]], skip_special: bool) -> None:
    detokenizer = Detokenizer(decode, special_tokens() if skip_special else frozenset())
    text = "".join(map(detokenizer.feed, slices)) + detokenizer.finish()
    assert text == decode([token for part in slices for token in part], skip_special=skip_special)


def test_text_is_decoded_while_a_template_is_loaded(tmp_path: Path) -> None:
    """The event loop decodes streams, so it must not wait for a file or for the network."""
    text = ModelText(ApiSettings(data_dir=tmp_path, base_model=str(PACKAGED)))
    tokens = text.encode("Hello", add_special=False)
    with text._loading:
        assert text.decode(tokens) == "Hello"


@given(text=st.text(max_size=40), size=st.integers(1, 4))
def test_no_piece_has_a_part_of_a_character(text: str, size: int) -> None:
    tokens = tokenizer().encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    whole = decode(tokens)
    assert "".join(pieces) + detokenizer.finish() == whole
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole


@given(texts=st.lists(st.sampled_from([" ", " a", "a", "é", "日", " Hello", "🙂", "ü", "<"]), max_size=12))
def test_text_of_a_byte_fallback_vocabulary_is_whole(texts: list[str]) -> None:
    detokenizer = Detokenizer(decode_byte_fallback)
    tokens: list[int] = []
    for text in texts:
        token = byte_fallback_tokenizer().token_to_id(text.replace(" ", "▁"))
        tokens += [1 + byte for byte in text.encode()] if token is None else [token]
    pieces = [detokenizer.feed([token]) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == "".join(texts).removeprefix(" ")
    assert not any("\ufffd" in piece for piece in pieces)


@given(tokens=st.lists(st.integers(1, 262), max_size=12))
def test_invalid_bytes_of_a_byte_fallback_vocabulary_do_not_end_a_stream(tokens: list[int]) -> None:
    """`DecodeStream` raises "Invalid prefix" for such bytes."""
    detokenizer = Detokenizer(decode_byte_fallback)
    pieces = [detokenizer.feed([token]) for token in [*tokens, 1 + ord("b"), 1 + 0xE6, 259]]
    assert ("".join(pieces) + detokenizer.finish()).endswith("a")  # token 259


@given(data=st.data())
def test_invalid_bytes_are_released_in_time(data: st.DataObject) -> None:
    """Thousands of invalid bytes cost as much per token as any other text."""
    parts = [token for token in range(VOCAB_SIZE) if tokenizer().decode([token]) == "\ufffd"]
    tokens = data.draw(st.lists(st.sampled_from(parts), min_size=60, max_size=150))
    detokenizer, released = Detokenizer(decode, special_tokens()), ""
    for number, token in enumerate(tokens, 1):
        released += detokenizer.feed([token])
        whole = decode(tokens[:number], skip_special=True)
        assert whole.startswith(released) and len(whole) - len(released) <= 64
    tokens += (rest := tokenizer().encode("é.").ids)
    assert released + detokenizer.feed(rest) + detokenizer.finish() == decode(tokens, skip_special=True)


WORDS = st.text("ab<", max_size=12)


@given(pieces=st.lists(WORDS, max_size=8), stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
@pytest.mark.parametrize("keep", [False, True])
def test_text_ends_before_the_first_complete_stop_string(pieces: list[str], stops: list[str], keep: bool) -> None:
    found = StopStrings(stops, keep_match=keep)
    text = "".join(map(found.feed, pieces)) + found.finish()
    whole = "".join(pieces)
    ends = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    if not ends:
        assert text == whole and found.matched is None
    else:
        end, start, _ = min(ends)
        assert text == whole[: end if keep else start] and found.matched is not None


@given(pieces=st.lists(WORDS, max_size=8), stop=st.text("ab<", min_size=2, max_size=4))
def test_only_a_possible_beginning_of_a_stop_string_is_held(pieces: list[str], stop: str) -> None:
    found, released, seen = StopStrings([stop]), "", ""
    for piece in pieces:
        released, seen = released + found.feed(piece), seen + piece
        if found.matched is not None:
            break
        held = seen.removeprefix(released)
        assert seen.startswith(released) and stop.startswith(held) and len(held) < len(stop)


@pytest.mark.parametrize(
    ("stop", "expected"), [("<|im_end|>", "a\n"), ("\n<|im_end|>", "a"), ("b", "a\n"), ("<|im_end|>x", "a\n")]
)
@pytest.mark.parametrize("size", [1, 9])
def test_stop_string_with_a_special_token_is_known(stop: str, expected: str, size: int) -> None:
    eos = tokenizer().token_to_id("<|im_end|>")
    tokens = tokenizer().encode("a\n<|im_end|>", add_special_tokens=False).ids
    text = SampleText(decode, stops=[stop], stop_tokens=frozenset({eos}), hidden=special_tokens())
    pieces = [text.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join(pieces) + text.finish() == expected
    assert text.stop_string == (stop if stop.endswith("<|im_end|>") else None)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_text_before_min_tokens_may_contain_stop_strings(size: int) -> None:
    tokens = [tokenizer().token_to_id(letter) for letter in "abaccaba"]
    text = SampleText(decode, stops=["b"], stop_tokens=frozenset(), min_tokens=3)
    pieces = [text.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join(pieces) + text.finish() == "abacca" and text.stop_string == "b"


def test_special_tokens_that_separate_parts_stay_in_the_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
    made.add_special_tokens(["<|channel|>", "<|pad|>"])
    channel, pad = VOCAB_SIZE, VOCAB_SIZE + 1
    monkeypatch.setattr(ModelText, "_load", lambda self: made)
    text = ModelText(ApiSettings(base_model="tiny", data_dir=tmp_path))

    hidden = text.find_hidden_tokens({"<|channel|>", "<tool_call>"})
    assert pad in hidden and channel not in hidden
    sample = SampleText(text.decode, stops=[], stop_tokens=frozenset(), hidden=hidden)
    word = made.encode("final", add_special_tokens=False).ids
    assert sample.feed([pad, channel, *word, pad]) + sample.feed([pad]) + sample.finish() == "<|channel|>final"


def test_stop_token_is_no_part_of_the_text() -> None:
    eos = tokenizer().token_to_id("<|im_end|>")
    tokens = tokenizer().encode("a b", add_special_tokens=False).ids
    for keep, expected in ((False, "a b"), (True, "a b<|im_end|>")):
        text = SampleText(decode, stops=[], stop_tokens=frozenset({eos}), keep_stop=keep)
        assert text.feed([*tokens, eos]) + text.finish() == expected
