"""Of what sizes chunks and rooms of prompts are."""

from skyrl_tx.backends.jax.chunks import Chunks
from skyrl_tx.backends.jax.config import JaxConfig

CHUNKS = Chunks(size=32, longest=320)


def test_rooms_are_few_and_hold_the_padded_last_chunk():
    assert {CHUNKS.room_of(size) for size in range(1, 301)} == set(CHUNKS.rooms()) == {32, 128, 320}
    assert all(CHUNKS.room_of(size) >= -(-size // 32) * 32 for size in range(1, 301))


def test_a_short_context_has_no_longer_chunks():
    assert Chunks.of(JaxConfig(), 100) == Chunks(128, 128)
    assert Chunks.of(JaxConfig(), 300) == Chunks(256, 512)
    assert Chunks.of(JaxConfig(prefill_chunk_tokens=1024), 1500) == Chunks(1024, 2048)
