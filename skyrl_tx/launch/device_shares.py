"""Shares out the accelerators of a machine among the engines that `serve --engines` starts."""

import re
from collections.abc import Mapping
from pathlib import Path

from skyrl_tx.process.setup import CannotServe

_GPUS, _CHIPS = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"
_ONE_CHIP = {
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables of a process that uses one chip of several (docs.cloud.google.com/tpu, libtpu)."""


def assign_devices(num_engines: int, environment: Mapping[str, str], devices: Path) -> list[Mapping[str, str]]:
    """Return the environment variables of each engine that let it see its own accelerators only.

    A machine without any shares nothing out. `devices` is `/dev`. Raises CannotServe if there are no equal parts.
    """
    if num_engines == 1:
        return [{}]
    if gpus := _list_visible_devices(environment.get(_GPUS), devices, r"nvidia(\d+)"):
        size, rest = divmod(len(gpus), num_engines)
        if not size or rest:
            raise CannotServe(f"--engines {num_engines}: {len(gpus)} GPUs are not shared out in equal parts")
        return [{_GPUS: ",".join(gpus[start : start + size])} for start in range(0, len(gpus), size)]
    if chips := _list_visible_devices(environment.get(_CHIPS), devices, r"accel(\d+)") or _list_visible_devices(
        None, devices / "vfio", r"(\d+)"
    ):
        if len(chips) != num_engines:
            raise CannotServe(f"--engines {num_engines}: there are {len(chips)} TPU chips, and an engine gets one")
        return [{_CHIPS: chip, **_ONE_CHIP} for chip in chips]
    return [{} for _ in range(num_engines)]


def _list_visible_devices(chosen: str | None, devices: Path, pattern: str) -> list[str]:
    """Return the names of the devices that were chosen by a variable, by default the numbers of those that exist."""
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    found = [re.fullmatch(pattern, path.name) for path in devices.iterdir()] if devices.is_dir() else []
    return sorted((match[1] for match in found if match), key=int)
