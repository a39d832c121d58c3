r"""Collects the wheels that a GPU host without a network needs to run the server and the SDK, with their hashes.

The host has Python 3.12 on x86-64 and the packages of `PROVIDED`: JAX, PyTorch, transformers and peft with their
requirements. This program downloads all other packages that skyrl_tx, the SDK and the tests of `make gpu` need into a
directory, with a requirements file that has the hash of each package. On the host, in a checkout with that directory,
these commands install them next to the existing packages, and then skyrl_tx itself:

    pip install --no-index --find-links build/wheels --require-hashes --no-deps --upgrade --target /tmp/site \
        -r build/wheels/requirements.txt
    export PYTHONPATH=/tmp/site
    pip install --no-index --no-deps --no-build-isolation --upgrade --target /tmp/site .
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build" / "wheels"
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
EXTRA = ("tinker>=0.38", "setuptools>=77", "pytest>=9.0", "pytest-xdist>=3.8", "hypothesis>=6.100")
"""Needed besides the dependencies of skyrl_tx: the SDK, the build of skyrl_tx, and the tests of `make gpu`."""
PROVIDED = frozenset(
    {
        *("jax", "jaxlib", "ml-dtypes", "numpy", "opt-einsum", "scipy"),
        *("torch", "transformers", "peft", "safetensors", "tokenizers", "huggingface-hub", "hf-xet"),
        *("accelerate", "filelock", "fsspec", "psutil", "pyyaml", "regex", "tqdm"),
        # Checkpoints of flax, which skyrl_tx does not use.
        *("orbax-checkpoint", "tensorstore", "etils", "humanize", "simplejson", "zipp", "aiofiles"),
    }
)
"""Packages that the host has, or that no one imports. flax and optax are pure Python and are collected."""
MOST_MB = 60.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that the host lacks."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def normalize(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*arguments: str) -> None:
    """Run pip for the Python and the platforms of the host."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--only-binary=:all:", "--python-version", PYTHON]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--implementation", "cp"], check=True)


def resolve(requirements: list[str]) -> list[Wheel]:
    """Return the wheels of these requirements and all that they need, less what the host has."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--dry-run", "--ignore-installed", "--target", folder, "--report", str(report), *requirements)
        return select(json.loads(report.read_text()))


def select(report: dict[str, Any]) -> list[Wheel]:
    """Return the wheels of an installation report of pip that the host lacks, by name."""
    wheels: list[Wheel] = []
    for entry in report["install"]:
        name = normalize(entry["metadata"]["name"])
        if name not in PROVIDED:
            digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
            wheels.append(Wheel(name, entry["metadata"]["version"], digest))
    return sorted(wheels, key=lambda wheel: wheel.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=WHEELS, help="is emptied first")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheels = resolve([*project["dependencies"], *EXTRA])

    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    listed = options.directory / "requirements.txt"
    listed.write_text("".join(f"{wheel.requirement}\n" for wheel in wheels))
    pip("download", "--no-deps", "--require-hashes", "--dest", str(options.directory), "--requirement", str(listed))

    total_mb = sum(file.stat().st_size for file in options.directory.glob("*.whl")) / 1e6
    print(f"{len(wheels)} wheels of {total_mb:.1f} MB in {options.directory}, with {listed.name}")
    if total_mb > MOST_MB:
        largest = sorted(options.directory.glob("*.whl"), key=lambda file: -file.stat().st_size)[:5]
        sys.exit(f"more than {MOST_MB:.0f} MB; the largest are {', '.join(file.name for file in largest)}")


if __name__ == "__main__":
    main()
