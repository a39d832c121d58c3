"""The share of a GPU's memory that the backend takes, with the driver's command replaced by a script."""

import logging
import stat
from pathlib import Path

import pytest

from skyrl_tx.backends.jax import gpu_memory
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.gpu_memory import SHARE_VARIABLE, read_gpu_share, reserve_gpu_memory
from skyrl_tx.contract.errors import UserError
from skyrl_tx.process.memory import Gpu, list_gpus, select_visible

BOTH = JaxConfig(mesh=MeshConfig(dp=2))


@pytest.fixture
def use_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces the rows of `nvidia-smi`: MiB in use of each H100."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    for name in (SHARE_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # restored after the test, which may set it
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpu_memory, "_WAIT_S", 0.0)

    def use(*used: int) -> None:
        rows = [f"{i}, GPU-{i}, NVIDIA H100, 570.1, 81559, {mib}" for i, mib in enumerate(used)]
        program.write_text(
            "#!/bin/sh\n" + "".join(f'echo "{row}"\n' for row in (*rows, "9, GPU-9, broken, 1, [N/A], 0"))
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return use


def test_an_empty_gpu_is_taken_almost_whole(use_gpus, caplog: pytest.LogCaptureFixture) -> None:
    use_gpus(4, 600)
    with caplog.at_level(logging.INFO):
        reserve_gpu_memory(BOTH)
    assert read_gpu_share(None) == 0.92
    assert "JAX takes 73.3 GiB of the 79.6 GiB of GPU 1 (NVIDIA H100), a share of 0.92" in caplog.text


def test_a_gpu_that_other_programs_use_is_refused(use_gpus) -> None:
    use_gpus(4, 40_000)
    with pytest.raises(UserError, match=r"39\.1 GiB of the 79\.6 GiB of GPU 1 .*gpu-memory-share to at most 0\.5$"):
        reserve_gpu_memory(BOTH)
    reserve_gpu_memory(JaxConfig())  # uses the first GPU only


def test_the_share_does_not_depend_on_free_memory(use_gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """So two starts plan the same micro-batches, slots and cache."""
    shares = set()
    for used in (4, 600, 6_000):
        monkeypatch.delenv(SHARE_VARIABLE, raising=False)
        use_gpus(used)
        reserve_gpu_memory(JaxConfig())
        shares.add(read_gpu_share(None))
    assert shares == {0.92}


@pytest.mark.parametrize(("setting", "variable", "expected"), [(0.5, "", 0.5), (None, "0.6", 0.6), (0.5, "0.6", 0.5)])
def test_a_configured_share_is_used(use_gpus, monkeypatch, setting, variable, expected) -> None:
    use_gpus(40_000)
    monkeypatch.setenv(SHARE_VARIABLE, variable)
    reserve_gpu_memory(JaxConfig(gpu_memory_share=setting))
    assert read_gpu_share(None) == expected


@pytest.mark.parametrize("wrong", ["90%", "0", "1.5", "nan"])
def test_a_wrong_share_is_named(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, wrong)
    with pytest.raises(UserError, match=f"{SHARE_VARIABLE} is '{wrong}'"):
        read_gpu_share(None)


def test_the_command_of_the_driver_is_read(use_gpus) -> None:
    use_gpus(4)
    gpus = list_gpus()
    assert gpus == [Gpu("0", "GPU-0", "NVIDIA H100", "570.1", 81559 << 20, 4 << 20)]
    visible = [len(select_visible(gpus, {"CUDA_VISIBLE_DEVICES": chosen})) for chosen in ("0", "GPU-0", "1", "")]
    assert visible == [1, 1, 0, 0] and select_visible(gpus, {}) == gpus
    use_gpus()
    assert list_gpus() == []
