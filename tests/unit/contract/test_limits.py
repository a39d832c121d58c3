import pytest

from skyrl_tx.contract.limits import MAX_CELLS, max_targets


@pytest.mark.parametrize(
    ("num_positions", "expected"),
    [
        (0, 2**19),
        (1, 2**19),
        (32, 2**19),
        (33, 2**18),
        (1024, 2**14),
        (4096, 4096),
        (32768, 512),
        (2**24, 1),
        (2**40, 1),
    ],
)
def test_what_a_sequence_may_have(num_positions: int, expected: int) -> None:
    assert max_targets(num_positions) == expected
    assert expected == 1 or expected * max(num_positions, 32) <= MAX_CELLS
