"""The accelerators of a machine are divided equally."""

from pathlib import Path

import pytest

from skyrl_tx.launch.launcher import assign_devices
from skyrl_tx.process.setup import CannotServe


def machine(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def test_engines_get_equal_numbers_of_the_gpus_in_order(tmp_path: Path) -> None:
    devices = machine(tmp_path, *(f"nvidia{number}" for number in range(12)), "nvidiactl", "nvidia-uvm")
    shares = assign_devices(4, {}, devices)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1,2", "3,4,5", "6,7,8", "9,10,11"]


def test_only_chosen_gpus_are_shared_out(tmp_path: Path) -> None:
    devices = machine(tmp_path, *(f"nvidia{number}" for number in range(8)))
    chosen = {"CUDA_VISIBLE_DEVICES": "GPU-a, 5"}
    assert assign_devices(2, chosen, devices) == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "5"}]


@pytest.mark.parametrize("names", [[f"accel{number}" for number in range(4)], ["vfio/0", "vfio/1", "vfio/2", "vfio/3"]])
def test_each_engine_gets_one_tpu_chip(tmp_path: Path, names: list[str]) -> None:
    shares = assign_devices(4, {}, machine(tmp_path, *names, "vfio/vfio"))
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0", "1", "2", "3"]
    assert all(share["TPU_PROCESS_BOUNDS"] == "1,1,1" for share in shares)


def test_a_machine_without_accelerators_shares_nothing_out(tmp_path: Path) -> None:
    assert assign_devices(3, {}, tmp_path) == [{}, {}, {}]
    assert assign_devices(1, {}, machine(tmp_path, "nvidia0")) == [{}], "one engine has them all"


@pytest.mark.parametrize(("names", "message"), [(["nvidia0", "nvidia1"], "2 GPUs"), (["accel0", "accel1"], "2 TPU")])
def test_unequal_parts_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(CannotServe, match=f"--engines 3: .*{message}"):
        assign_devices(3, {}, machine(tmp_path, *names))
