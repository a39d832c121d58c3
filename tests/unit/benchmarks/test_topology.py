"""Descriptions of devices that are not present."""

import re

import jax
import pytest
from jax.experimental import topologies

from benchmarks.ahead.topology import describe_layout, gpu_target
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.contract.errors import UserError
from skyrl_tx.tools.plan.hardware import KINDS


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_gpu_is_described_as_its_kind_is(name: str) -> None:
    text, kind = gpu_target(name), KINDS[name]
    fields = dict(re.findall(r"^  (\w+): (.*)$", text, re.MULTILINE))
    assert float(fields["memory_bandwidth"]) == pytest.approx(kind.bytes_per_s, rel=0.01)
    # The data sheets count 10^9 bytes, and the driver keeps some of the memory.
    assert float(fields["device_memory_size"]) == pytest.approx(kind.memory_bytes, rel=0.08)
    assert "cuda_compute_capability { major: 9 minor: 0 " in text and fields["core_count"] == "132"
    assert text.count("{") == text.count("}")


def test_a_gpu_without_description_is_named() -> None:
    with pytest.raises(UserError, match="--device: l4 is not described; of the GPUs, h100 and h200 are"):
        describe_layout("gpu", "l4:1", MeshConfig())


@pytest.mark.parametrize(
    ("family", "topology", "packages"),
    [("tpu", "v5e:1x1", r"'skyrl-tx-server\[tpu\]'"), ("gpu", "h200:1", "jax-cuda12-plugin jax-cuda12-pjrt")],
)
def test_a_missing_compiler_is_named(family, topology, packages, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: str) -> None:
        raise NotImplementedError("no\nsupport")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    with pytest.raises(UserError, match=rf"no compiler for {topology}: pip install {packages} \(no support\)"):
        describe_layout(family, topology, MeshConfig())


def test_more_gpus_than_one_host_has_are_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Description:
        devices = jax.devices() * 16

    def describe(**arguments: str) -> type[Description]:
        asked.append(arguments["topology"])
        return Description

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    for number in (1, 8, 16):
        describe_layout("gpu", f"h200:{number}", MeshConfig())
    assert asked == ["1x1x1", "1x1x8", "1x2x8"]
