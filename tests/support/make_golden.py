"""Makes the golden data directory of a release: `python -m tests.support.make_golden [--commit C]`, at each release.

Starts the server of that commit (default: the working tree) on the fake backend, leaves in its data directory one of
everything that must survive an upgrade, and kills it. Then the same code continues on a copy, and its results are
recorded as what later releases must give.
"""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from skyrl_tx import DISTRIBUTION
from tests.support.golden import BASE_MODEL, GOLDEN, GoldenClient, Record, continue_run, hash_arithmetic, write_golden
from tests.support.live_server import LiveServer

ROOT = Path(__file__).parents[2]
_OWNERS = ("ann", "bob")


class Release:
    """The code of one commit, run with this environment's dependencies."""

    def __init__(self, commit: str | None, directory: Path) -> None:
        self.commit = _git("rev-parse", "--short", commit or "HEAD").decode().strip()
        source = ROOT
        if commit is not None:
            source = directory / "source"
            with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "skyrl_tx", "pyproject.toml"))) as archive:
                archive.extractall(source, filter="data")
            _write_entry_points(source)
        # Without PYTHONSAFEPATH the current directory would come before the commit's code.
        self.environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
        self.version = self.run("--version").split()[-1]

    def run(self, *arguments: str) -> str:
        """Run its command line and return what it prints."""
        command = [sys.executable, "-m", "skyrl_tx", *arguments]
        return subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    def serve(self, data_dir: Path) -> LiveServer:
        """Start its server on the fake backend."""
        return LiveServer(
            data_dir, flags=("--base-model", BASE_MODEL, "--backend", "fake"), environment=self.environment
        )


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def _write_entry_points(source: Path) -> None:
    """Declare the commit's backends, whose modules may be named differently from the installed ones.

    Under the name of this distribution, in any commit, so that Python finds it instead of the installed one.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = source / f"{DISTRIBUTION.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["skyrl_tx.backends"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[skyrl_tx.backends]", *lines, ""]))


def make(commit: str | None, output: Path | None) -> Path:
    """Make a golden file and return its path."""
    with tempfile.TemporaryDirectory(prefix="skyrl_tx-golden-") as folder:
        directory = Path(folder)
        release = Release(commit, directory)
        record = Record(version=release.version, commit=release.commit, arithmetic=hash_arithmetic())
        data_dir = directory / "golden" / "data"
        data_dir.mkdir(parents=True, mode=0o700)

        try:
            for owner in _OWNERS:
                record.keys[owner] = release.run("keys", "create", owner, "--data-dir", str(data_dir)).strip()
        except subprocess.CalledProcessError:
            print(f"{release.commit} has no API keys")

        key = record.keys.get(_OWNERS[0])
        with release.serve(data_dir) as server, closing(GoldenClient(server.url, key)) as client:
            _train_and_save(client, record)
        with release.serve(data_dir) as server, closing(GoldenClient(server.url, key)) as client:
            _leave_work(client, record, server)
        copy = directory / "copy"
        shutil.copytree(data_dir, copy, ignore=_sockets)
        with release.serve(copy) as server, closing(GoldenClient(server.url, key)) as client:
            record.results = continue_run(client, record, copy)
        file = output or GOLDEN / f"{release.version}.tar.xz"
        file.parent.mkdir(exist_ok=True)
        write_golden(file, data_dir, record)
        return file


def _sockets(directory: str, names: list[str]) -> set[str]:
    return {name for name in names if Path(directory, name).is_socket()}


def _train_and_save(client: GoldenClient, record: Record) -> None:
    """Train a model and save it in all ways. The server then stops cleanly, with a snapshot."""
    record.session_id = client.post("create_session", tags=["golden"], sdk_version="0.38.0")["session_id"]
    record.model_id = _create_model(client, record, 0)
    for step in range(2):
        client.result(client.forward_backward(record.model_id, 1 + 2 * step, start=1 + step))
        client.result(client.optim_step(record.model_id, 2 + 2 * step))
    seq_id = 5

    for kind, endpoint in (
        ("weights", "save_weights"),
        ("sampler_weights", "save_weights_for_sampler"),
        ("external_weights", "save_weights_external"),
    ):
        try:
            saved = client.call(endpoint, model_id=record.model_id, seq_id=seq_id, path=f"golden-{kind}")
        except AssertionError as error:
            print(f"{record.commit}: {error}")
            continue
        record.checkpoints[kind] = saved["path"]
        seq_id += 1

    try:
        client.post(f"training_runs/{record.model_id}/checkpoints/weights/golden-weights/publish")
    except AssertionError as error:
        print(f"{record.commit}: {error}")

    path = record.checkpoints["sampler_weights"]
    made = client.post("create_sampling_session", **_sampling(record, 0), model_path=path)
    record.samplers.append(made["sampling_session_id"])
    record.samplers.append(_ephemeral(client, record, seq_id, 1))
    record.next_seq_id = seq_id + 1


def _leave_work(client: GoldenClient, record: Record, server: LiveServer) -> None:
    """Leave requests after the snapshot, a gradient, unread results and unfinished requests; kill the server."""
    seq_id = record.next_seq_id
    client.result(client.forward_backward(record.model_id, seq_id, start=3))
    client.result(client.optim_step(record.model_id, seq_id + 1))
    record.samplers.append(_ephemeral(client, record, seq_id + 2, 2))
    record.replayed_model_id = _create_model(client, record, 1)
    client.result(client.forward_backward(record.replayed_model_id, 1, start=9))
    client.result(client.optim_step(record.replayed_model_id, 2))
    record.unread = {
        "unread gradient": client.forward_backward(record.model_id, seq_id + 3, start=4),
        "unread sample": client.sample(record.samplers[0], 0),
    }
    client.result(client.sample(record.samplers[1], 0))  # takes its turn after the unread one
    client.result(client.forward_backward(record.model_id, seq_id + 4, start=5))
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    record.unfinished = {
        "unfinished gradient": client.forward_backward(record.model_id, seq_id + 5, start=6),
        "unfinished sample": client.sample(record.samplers[2], 0),
    }
    record.next_seq_id = seq_id + 6
    os.kill(engine, signal.SIGKILL)
    server.kill()
    time.sleep(0.5)


def _create_model(client: GoldenClient, record: Record, model_seq_id: int) -> str:
    lora = {"rank": 2, "seed": 11 + model_seq_id, "train_attn": True, "train_mlp": True, "train_unembed": True}
    asked = {"session_id": record.session_id, "model_seq_id": model_seq_id, "base_model": BASE_MODEL}
    return client.call("create_model", **asked, lora_config=lora)["model_id"]


def _sampling(record: Record, sampling_session_seq_id: int) -> dict[str, object]:
    return {"session_id": record.session_id, "sampling_session_seq_id": sampling_session_seq_id}


def _ephemeral(client: GoldenClient, record: Record, seq_id: int, sampling_session_seq_id: int) -> str:
    asked = {"model_id": record.model_id, "seq_id": seq_id, "sampling_session_seq_id": sampling_session_seq_id}
    saved = client.call("save_weights_for_sampler", **asked)
    return saved["sampling_session_id"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make one golden file."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.make_golden", description=make.__doc__)
    parser.add_argument("--commit", help="commit whose code makes the directory (default: the working tree)")
    parser.add_argument("--output", type=Path, help="file to write (default: tests/golden/VERSION.tar.xz)")
    options = parser.parse_args(arguments)
    file = make(options.commit, options.output)
    print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
