"""Stop strings are found across token boundaries."""

from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.engine.sample_requests import StopStringMatcher


def pieces(*texts):
    """Return a decoder for a vocabulary of byte strings, like in byte-level tokenizers."""
    vocabulary = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return lambda tokens: b"".join(vocabulary[token] for token in tokens).decode(errors="replace")


def test_match_across_tokens_and_slices():
    watch = StopStringMatcher(["end"], pieces("the ", "e", "nd", "."))
    assert watch.feed([0, 1]) is None
    assert watch.feed([2, 3]) == 1


def test_first_match_ends_the_sample():
    assert StopStringMatcher(["cd", "b"], pieces("a", "b", "c", "d")).feed([0, 1, 2, 3]) == 2


def test_no_match_before_min_tokens():
    pieces_of = pieces("a", "b")
    assert StopStringMatcher(["b"], pieces_of, min_tokens=3).feed([0, 1, 0, 1, 0]) == 4
    watch = StopStringMatcher(["ab"], pieces_of, min_tokens=3)
    assert [watch.feed(tokens) for tokens in ([0], [1, 0, 1], [0, 1])] == [None, None, 2]


def test_token_that_completes_the_match_is_kept():
    assert StopStringMatcher(["\n"], pieces("a", "\n\n", "b")).feed([0, 1, 2]) == 2


def test_characters_of_several_tokens():
    watch = StopStringMatcher(["é!"], pieces(b"\xc3", b"\xa9", "!"))
    assert [watch.feed([token]) for token in (0, 1, 2)] == [None, None, 1]


def test_tokens_without_text_do_not_hide_a_match():
    watch = StopStringMatcher(["ab"], pieces("a", "", "b"))
    assert watch.feed([0]) is None
    assert all(watch.feed([1]) is None for _ in range(50))
    assert watch.feed([2]) == 1


def test_no_stop_strings_decode_no_text():
    def decode(tokens):
        raise AssertionError("not asked for")

    assert StopStringMatcher([], decode).feed([1, 2]) is None


@given(
    tokens=st.lists(st.integers(0, 5), max_size=60),
    cuts=st.lists(st.integers(1, 7), min_size=60, max_size=60),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_slice_boundaries_change_no_match(tokens, cuts, stops):
    text_of = pieces("a", "b", "ab", b"\xc3", b"\xa9", "")
    expected = next((n for n in range(1, len(tokens) + 1) if any(stop in text_of(tokens[:n]) for stop in stops)), None)
    watch, start, found = StopStringMatcher(stops, text_of), 0, None
    for size in cuts:
        kept = watch.feed(tokens[start : start + size])
        if kept is not None:
            found = start + kept
            break
        start += size
    assert found == expected
