"""Stop strings are found wherever token boundaries fall."""

from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.engine.stops import StopWatch


def pieces(*texts):
    """A vocabulary of byte strings, as byte-level tokenizers have it."""
    vocabulary = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return lambda tokens: b"".join(vocabulary[token] for token in tokens).decode(errors="replace")


def test_a_match_across_tokens_and_slices():
    watch = StopWatch(["end"], pieces("the ", "e", "nd", "."))
    assert watch.feed([0, 1]) is None
    assert watch.feed([2, 3]) == 1


def test_the_first_of_several_ends_the_sample():
    assert StopWatch(["cd", "b"], pieces("a", "b", "c", "d")).feed([0, 1, 2, 3]) == 2


def test_the_token_that_completes_the_match_is_kept_whole():
    assert StopWatch(["\n"], pieces("a", "\n\n", "b")).feed([0, 1, 2]) == 2


def test_characters_of_several_tokens():
    watch = StopWatch(["é!"], pieces(b"\xc3", b"\xa9", "!"))
    assert [watch.feed([token]) for token in (0, 1, 2)] == [None, None, 1]


def test_tokens_without_text_do_not_hide_a_match():
    watch = StopWatch(["ab"], pieces("a", "", "b"))
    assert watch.feed([0]) is None
    assert all(watch.feed([1]) is None for _ in range(50))
    assert watch.feed([2]) == 1


def test_nothing_to_look_for_needs_no_text():
    def text_of(tokens):
        raise AssertionError("not asked for")

    assert StopWatch([], text_of).feed([1, 2]) is None


@given(
    tokens=st.lists(st.integers(0, 5), max_size=60),
    cuts=st.lists(st.integers(1, 7), min_size=60, max_size=60),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_slices_change_nothing(tokens, cuts, stops):
    text_of = pieces("a", "b", "ab", b"\xc3", b"\xa9", "")
    expected = next((n for n in range(1, len(tokens) + 1) if any(stop in text_of(tokens[:n]) for stop in stops)), None)
    watch, start, found = StopWatch(stops, text_of), 0, None
    for size in cuts:
        kept = watch.feed(tokens[start : start + size])
        if kept is not None:
            found = start + kept
            break
        start += size
    assert found == expected
