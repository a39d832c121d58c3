"""Fetches the vendored files of the console from npm, as `VENDOR.toml` lists them, and checks their hashes.

`python -m tests.support.fetch_vendored` (`make vendor`). To take a new version, change its number there; the program
then prints the new hashes.
"""

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parents[2] / "skyrl_tx" / "apps" / "console" / "static" / "vendor"


def packages() -> list[dict[str, Any]]:
    """Return the packages of `VENDOR.toml`."""
    return tomllib.loads((VENDOR / "VENDOR.toml").read_text())["package"]


def digest(content: bytes) -> str:
    """Return a SHA-256 as `VENDOR.toml` has it."""
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    """Replace the files; return 1 if a hash differs."""
    has_changed = False
    for package in packages():
        with tempfile.TemporaryDirectory() as folder:
            name = f"{package['name']}@{package['version']}"
            subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            (archive,) = Path(folder).glob("*.tgz")
            files = _read(archive.read_bytes())
        for path, expected in package["files"].items():
            content = files[f"package/{path}"]
            (VENDOR / package["directory"] / Path(path).name).write_bytes(content)
            if digest(content) != expected:
                has_changed = True
                print(f'{name}: "{path}" = "{digest(content)}"', file=sys.stderr)
    return int(has_changed)


def _read(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        return {member.name: file.read() for member in members if (file := tar.extractfile(member)) is not None}


if __name__ == "__main__":
    raise SystemExit(main())
