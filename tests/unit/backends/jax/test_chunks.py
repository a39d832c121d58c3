"""Of what sizes chunks and rooms of prompts are."""

import pytest

from skyrl_tx.backends.jax.chunks import FIRST, Chunks, padded
from skyrl_tx.backends.jax.config import JaxConfig

CHUNKS = Chunks(size=32, longest=320)


def test_rooms_are_few_and_hold_the_padded_last_chunk():
    assert {CHUNKS.room_of(size) for size in range(1, 301)} == set(CHUNKS.rooms()) == {32, 128, 320}
    assert all(CHUNKS.room_of(size) >= -(-size // 32) * 32 for size in range(1, 301))


def test_a_short_context_has_no_longer_chunks():
    assert Chunks.of(JaxConfig(), 100) == Chunks(128, 128)
    assert Chunks.of(JaxConfig(), 300) == Chunks(256, 512)
    assert Chunks.of(JaxConfig(prefill_chunk_tokens=1024), 1500) == Chunks(1024, 2048)


def sizes(chunks: Chunks, length: int) -> list[int]:
    """Of the chunks of one prompt, padding included."""
    found, start = [], 0
    while start < length:
        end = min(chunks.end(start), length)
        found.append(padded(end - start))
        start = end
    return found


@pytest.mark.parametrize(
    ("size", "ends"), [(256, [128, 256, 512, 768]), (1024, [128, 256, 512, 1024, 2048]), (64, [64, 128])]
)
def test_ends_double_and_less_than_half_of_what_is_shared_is_lost(size, ends):
    chunks = Chunks(size=size, longest=4 * size)
    assert [end for end in range(1, ends[-1] + 1) if chunks.last_end(end) == end] == ends
    for length in range(min(FIRST, size), 4 * size):
        assert length / 2 < chunks.last_end(length) <= length < chunks.last_end(length) + size
        assert sum(sizes(chunks, length)) <= chunks.room_of(length)


@pytest.mark.parametrize("max_length", [20, 100, 200, 384, 385, 512, 600, 2000])
@pytest.mark.parametrize("size", [32, 256, 512])
def test_a_warm_up_has_chunks_of_every_size_that_come(max_length, size):
    chunks = Chunks.of(JaxConfig(prefill_chunk_tokens=size), max_length)
    seen = {each for length in chunks.lengths(max_length) for each in sizes(chunks, length - 1)}
    assert seen >= {each for length in range(1, max_length) for each in sizes(chunks, length)}
    assert set(chunks.padded_sizes()) >= seen
