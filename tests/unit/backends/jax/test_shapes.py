"""The sizes of prefill chunks."""

import pytest

from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.shapes import FIRST_CHUNK, PrefillShapes

CPU = JaxConfig().with_platform_defaults("cpu")


def test_chunks_are_no_longer_than_the_context():
    assert PrefillShapes.from_config(CPU, 100) == PrefillShapes(128)
    assert PrefillShapes.from_config(CPU, 300) == PrefillShapes(256)
    assert PrefillShapes.from_config(JaxConfig().with_platform_defaults("gpu"), 4000) == PrefillShapes(512)
    assert PrefillShapes.from_config(JaxConfig(prefill_chunk_tokens=1024), 1500) == PrefillShapes(1024)


def test_the_chunks_of_a_prompt_have_these_sizes():
    assert list(PrefillShapes(512).iter_prompt_sizes(912)) == [128, 128, 256, 512]
    assert list(PrefillShapes(512).iter_prompt_sizes(1100)) == [128, 128, 256, 512, 128]
    assert list(PrefillShapes(256).iter_prompt_sizes(20)) == [32]
    assert list(PrefillShapes(256).iter_prompt_sizes(0)) == []


def test_large_chunks_have_few_padded_sizes():
    assert list(PrefillShapes(256).iter_padded_sizes()) == [32, 64, 128, 256]
    assert list(PrefillShapes(512).iter_padded_sizes()) == [128, 256, 512]
    assert [PrefillShapes(size).pad_size(33) for size in (64, 512)] == [64, 128]


def sizes(shapes: PrefillShapes, length: int) -> list[int]:
    """Return the padded sizes of the chunks of one prompt."""
    found, start = [], 0
    while start < length:
        end = min(shapes.chunk_end(start), length)
        found.append(shapes.pad_size(end - start))
        start = end
    return found


@pytest.mark.parametrize(
    ("size", "ends"), [(256, [128, 256, 512, 768]), (1024, [128, 256, 512, 1024, 2048]), (64, [64, 128])]
)
def test_chunk_ends_double_so_that_more_than_half_of_a_common_prefix_is_shared(size, ends):
    shapes = PrefillShapes(chunk_size=size)
    assert [end for end in range(1, ends[-1] + 1) if shapes.count_full_chunk_tokens(end) == end] == ends
    for length in range(min(FIRST_CHUNK, size), 4 * size):
        assert (
            length / 2
            < shapes.count_full_chunk_tokens(length)
            <= length
            < shapes.count_full_chunk_tokens(length) + size
        )


@pytest.mark.parametrize("max_length", [20, 100, 200, 384, 385, 512, 600, 2000])
@pytest.mark.parametrize("size", [32, 256, 512])
def test_warm_up_prompts_have_chunks_of_every_size(max_length, size):
    shapes = PrefillShapes.from_config(JaxConfig(prefill_chunk_tokens=size), max_length)
    seen = {padded for length in shapes.iter_prompt_lengths(max_length) for padded in sizes(shapes, length - 1)}
    assert seen >= {padded for length in range(1, max_length) for padded in sizes(shapes, length)}
    assert set(shapes.iter_padded_sizes()) >= seen
