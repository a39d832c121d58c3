"""The program `docker compose`, which reads its files without a container runtime."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.client_environments import PreparedEnvironment

DEPLOY = Path(__file__).parents[2] / "deploy"


class _Loader(yaml.SafeLoader):
    """Reads the tag `!reset`, which removes a value of the base file."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def read_file(name: str) -> dict[str, Any]:
    """Return what a file of `deploy` says, with its variables as they stand there."""
    return yaml.load((DEPLOY / name).read_text(), _Loader)


class ComposeRefused(Exception):
    """Docker Compose refuses the files; the message is its own."""


def read_project(
    environment: PreparedEnvironment,
    files: Sequence[str],
    *,
    profiles: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return what Docker Compose makes of files of `deploy`, with the values of compose.env and of `variables`.

    The environment is `DEPLOYMENT`. Raises ComposeRefused.
    """
    command: list[str | Path] = [environment.python.with_name("docker-compose"), "--env-file", DEPLOY / "compose.env"]
    command += [flag for name in files for flag in ("--file", str(DEPLOY / name))]
    command += [flag for name in profiles for flag in ("--profile", name)]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SKYRL_TX_", "COMPOSE_"))}
    done = subprocess.run(
        [*command, "config", "--format", "json"],
        env={**own, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ComposeRefused(done.stderr)
    return json.loads(done.stdout)
