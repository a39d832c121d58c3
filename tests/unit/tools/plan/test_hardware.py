"""Device names and topologies."""

import pytest

from skyrl_tx.tools.plan.hardware import GIB, KINDS, DeviceError, parse_devices


@pytest.mark.parametrize(
    ("text", "number", "shown"),
    [
        ("h200", 1, "h200:1"),
        ("H100:8", 8, "h100:8"),
        ("v5e:2x4", 8, "v5e:2x4"),
        ("v5p:2x2x1", 4, "v5p:2x2x1"),
        ("v4", 1, "v4:1x1x1"),
    ],
)
def test_devices_are_named(text: str, number: int, shown: str) -> None:
    found = parse_devices(text)
    assert (found.number, str(found)) == (number, shown)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("h300", "unknown device 'h300'; the known devices are b200, h200"),
        ("h200:", "'' must be a number of devices, for example h200:8"),
        ("h200:2x4", "'2x4' must be a number of devices"),
        ("h200:0", "'0' must be"),
        ("v5e:8", "'8' must be a topology of two sizes, for example v5e:2x4"),
        ("v5p:2x2", "a topology of three sizes, for example v5p:2x2x1"),
        ("v5e:2x-4", "'2x-4' must be"),
    ],
)
def test_others_are_refused_with_the_known_ones(text: str, named: str) -> None:
    with pytest.raises(DeviceError, match=named):
        parse_devices(text)


def test_the_memory_that_jax_may_take() -> None:
    assert parse_devices("h100:2").limit_bytes == pytest.approx(0.92 * 80e9)
    assert parse_devices("v5e:1x1").limit_bytes == 15.75 * GIB


def test_rates_of_each_kind_are_plausible() -> None:
    """Devices compute 100 to 1,000 FLOPs per byte of memory traffic, and memory is faster than the links."""
    for kind in KINDS.values():
        assert 100 < kind.flops / kind.bytes_per_s < 1000, kind.name
        assert kind.link_bytes_per_s < kind.bytes_per_s, kind.name
