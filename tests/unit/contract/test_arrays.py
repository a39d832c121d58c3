import pytest

from skyrl_tx.contract.arrays import MAX_CELLS, max_targets


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
def test_the_limit_of_targets_is_a_power_of_two_that_fits_the_matrix(num_positions: int, expected: int) -> None:
    assert max_targets(num_positions) == expected
    assert expected == 1 or expected * max(num_positions, 32) <= MAX_CELLS
