"""A small body costs the server little memory, even if it repeats parts; `make fuzz-amplification` tries more.

Memory is measured in a separate server process. The fuzzer also prints times, which are not tested
here because they depend on other programs.
"""

from collections.abc import Iterator

import pytest

from tests.support.fuzz.amplification import (
    SMALL_BYTES,
    TEXT_ROUTES,
    TEXTS,
    Attack,
    Target,
    iterate_attacks,
    running_target,
)

PLACES = {
    "/api/v1/create_session": ("an unknown field", "user_metadata by name"),
    "/api/v1/asample": ("sample .prompt.chunks",),
    "/api/v1/forward_backward": ("pass .forward_backward_input.data",),
}
FILLS = ("floats", "chunks")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with running_target() as target:
        yield target


def is_chosen(attack: Attack) -> bool:
    place, _, rest = attack.name.partition(": ")
    if not rest:
        return True  # protobuf
    if place.startswith("text for "):
        return True
    return place in PLACES.get(attack.path, ()) and rest.partition(" (")[0] in FILLS


def test_no_body_takes_much_more_memory_than_its_size(target: Target) -> None:
    chosen = [attack for attack in iterate_attacks(target) if is_chosen(attack)]
    num_texts = len(TEXT_ROUTES) * len(TEXTS)
    assert len(chosen) == 2 * len(FILLS) * sum(map(len, PLACES.values())) + 15 + num_texts
    costs = {attack.name: target.cost(attack) for attack in chosen}
    assert {name: cost for name, cost in costs.items() if cost.is_excessive} == {}
    assert any(cost.num_bytes < SMALL_BYTES for cost in costs.values())
    assert {200, 413} <= {cost.status for cost in costs.values()}, "some are stored, some are refused"
    texts = {cost.status for name, cost in costs.items() if name.startswith("text for ")}
    assert texts == {400}, "too long for the context"


def test_nothing_is_kept_of_a_body_without_a_key(target: Target) -> None:
    chosen = [attack for attack in iterate_attacks(target) if is_chosen(attack)][::5]
    costs = {attack.name: target.cost(attack, with_key=False) for attack in chosen}
    assert {name: cost for name, cost in costs.items() if cost.growth_bytes > 8 * 2**20} == {}
    assert {cost.status for cost in costs.values()} <= {401, 0}
