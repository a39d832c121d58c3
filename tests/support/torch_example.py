"""The backend of `examples/torch_backend`, usable in this process and child processes without installation."""

import importlib
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from skyrl_tx.contract.backend import BackendSpec

EXAMPLE = Path(__file__).parents[2] / "examples/torch_backend"


def torch_spec() -> BackendSpec:
    """Return the spec of the backend, which becomes importable."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module("skyrl_tx_torch").BACKEND


def torch_environment(directory: Path) -> Mapping[str, str]:
    """Return an environment in which the distribution is found; its metadata is written into `directory`.

    Each process gets one thread, because torch threads spin on shared cores.
    """
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    [(group, entries)] = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    paths = [str(directory), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
