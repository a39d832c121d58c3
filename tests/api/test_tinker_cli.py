"""Every command of the SDK's command line against a server: its output, and that it ends."""

import csv
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import httpx
import pytest
import tinker
from click.testing import CliRunner
from huggingface_hub import HfApi
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError

from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

TIMEOUT_S = 60.0
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@dataclass(frozen=True)
class CommandResult:
    """The output and exit status of a command."""

    status: int
    out: str
    error: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


@dataclass(frozen=True)
class CliServer:
    """A server with a run and three checkpoints of a user."""

    stack: LiveStack
    run_id: str
    session_id: str
    state: str
    sampler: str
    external: str
    folder: Path

    def tinker(self, *arguments: str, succeeds: bool = True) -> CommandResult:
        """Run a command. Fails if it does not end in time or with the expected status."""
        done: list[CommandResult] = []

        def work() -> None:
            result = CliRunner().invoke(main_cli, list(arguments))
            error = result.exception
            text = f"{error.message}\n{error.details}" if isinstance(error, TinkerCliError) else repr(error)
            done.append(CommandResult(result.exit_code, result.stdout, text if error else ""))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        assert done, f"tinker {' '.join(arguments)} still hangs after {TIMEOUT_S:.0f} s"
        assert (done[0].status == 0) is succeeds, done[0]
        return done[0]

    def json(self, *arguments: str) -> dict:
        return self.tinker("--format", "json", *arguments).json

    def list_checkpoints(self) -> dict[str, dict]:
        shown = self.json("checkpoint", "list", "--run-id", self.run_id)
        return {checkpoint["tinker_path"]: checkpoint for checkpoint in shown["checkpoints"]}


@pytest.fixture(scope="module")
def cli_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliServer]:
    with pytest.MonkeyPatch.context() as patch, live_stack("fake", tmp_path_factory.mktemp("stack")) as stack:
        home = tmp_path_factory.mktemp("home")
        for name, value in {
            "HOME": str(home),
            "TINKER_API_KEY": "tml-local",
            "TINKER_BASE_URL": stack.url,
            "TINKER_TELEMETRY": "0",
        }.items():
            patch.setenv(name, value)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # reads its environment variable only at import

        with tinker.ServiceClient() as service:
            client = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
            yield CliServer(
                stack=stack,
                run_id=client.model_id,
                session_id=client.model_id.split(":")[0],
                state=client.save_state("state").result().path,
                sampler=client.save_weights_for_sampler("sampler").result().path,
                external=client.save_weights_external("external").result().path,
                folder=tmp_path_factory.mktemp("downloads"),
            )


@pytest.fixture
def place(cli_server: CliServer, tmp_path: Path) -> CliServer:
    return replace(cli_server, folder=tmp_path)


def version(place: CliServer) -> None:
    assert "0." in place.tinker("version").out


def model_list(place: CliServer) -> None:
    assert PUBLIC_NAME in place.tinker("model", "list").out
    assert PUBLIC_NAME in json.dumps(place.json("model", "list", "qwen"))


def run_list(place: CliServer) -> None:
    assert place.run_id in place.tinker("run", "list").out
    assert place.run_id in json.dumps(place.json("run", "list", "--limit", "0"))


def run_info(place: CliServer) -> None:
    assert PUBLIC_NAME in place.tinker("run", "info", place.run_id).out
    assert "does not exist" in place.tinker("run", "info", "unknown:train:0", succeeds=False).error


def checkpoint_list(place: CliServer) -> None:
    assert set(place.list_checkpoints()) >= {place.state, place.sampler, place.external}
    for text in (place.tinker("checkpoint", "list").out, place.tinker("checkpoint", "list", "--limit", "0").out):
        assert "sampler_weights/sampler" in text


def checkpoint_info(place: CliServer) -> None:
    for path, kind in ((place.state, "training"), (place.sampler, "sampler"), (place.external, "external")):
        shown = place.json("checkpoint", "info", path)
        assert kind in json.dumps(shown) and path in json.dumps(shown)
    assert "not found" in place.tinker("checkpoint", "info", f"{place.state}2", succeeds=False).error


def checkpoint_download(place: CliServer) -> None:
    for path in (place.external, place.state):
        out = place.folder / path.rpartition("/")[2]
        place.tinker("checkpoint", "download", path, "--output", str(out))
        (folder,) = out.iterdir()
        assert {file.name for file in folder.iterdir()} == ADAPTER

    assert set(place.list_checkpoints()) == {
        place.state,
        place.sampler,
        place.external,
    }  # the temporary export is deleted
    refused = place.tinker("checkpoint", "download", place.sampler, "--output", str(place.folder), succeeds=False)
    assert "cannot be downloaded" in refused.error


def checkpoint_set_ttl(place: CliServer) -> None:
    place.tinker("checkpoint", "set-ttl", place.external, "--ttl", "7200")
    assert place.list_checkpoints()[place.external]["expires_at"] is not None
    place.tinker("checkpoint", "set-ttl", place.external, "--remove")
    assert place.list_checkpoints()[place.external]["expires_at"] is None
    assert "ttl" in place.tinker("checkpoint", "set-ttl", place.external, "--ttl", "60", succeeds=False).error.lower()


def checkpoint_delete(place: CliServer) -> None:
    answer = place.stack.server.post("save_weights", model_id=place.run_id, path="doomed")
    doomed = str(place.stack.server.result(answer)["path"])
    assert doomed in place.list_checkpoints()
    place.tinker("checkpoint", "delete", doomed, "--yes")
    assert doomed not in place.list_checkpoints()
    assert "Failed to delete 1 checkpoint" in place.tinker("checkpoint", "delete", doomed, "--yes").out


def checkpoint_publish(place: CliServer) -> None:
    place.tinker("checkpoint", "publish", place.sampler)
    assert place.list_checkpoints()[place.sampler]["public"] is True
    # Publishing twice is not a conflict, which the client would retry.
    place.tinker("checkpoint", "publish", place.sampler)


def checkpoint_unpublish(place: CliServer) -> None:
    place.tinker("checkpoint", "unpublish", place.sampler)
    assert place.list_checkpoints()[place.sampler]["public"] is False


def checkpoint_push_hf(place: CliServer) -> None:
    """A fake hub receives the adapter of training checkpoints and of external weights."""
    assert "Not logged in" in place.tinker("checkpoint", "push-hf", place.external, succeeds=False).error
    pushed: dict[str, dict[str, bytes]] = {}

    def upload_folder(_: HfApi, *, folder_path: str, repo_id: str, **options: object) -> None:
        pushed[repo_id] = {file.name: file.read_bytes() for file in Path(folder_path).iterdir()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "whoami", lambda _: {"name": "user"})
        patch.setattr(HfApi, "create_repo", lambda _, **options: None)
        patch.setattr(HfApi, "upload_folder", upload_folder)
        place.tinker("checkpoint", "push-hf", place.external, "--repo", "user/external")
        place.tinker("checkpoint", "push-hf", place.state, "--repo", "user/state")
        assert "cannot be downloaded" in place.tinker("checkpoint", "push-hf", place.sampler, succeeds=False).error
    for path, files in zip((place.external, place.state), pushed.values(), strict=True):
        assert set(files) == ADAPTER | {"README.md"}
        assert path in files["README.md"].decode() and "- LoRA rank: 8" in files["README.md"].decode()
        assert json.loads(files["adapter_config.json"])["r"] == 8
    assert pushed["user/external"]["adapter_model.safetensors"] == pushed["user/state"]["adapter_model.safetensors"]


def auth_status(place: CliServer) -> None:
    assert "accessible: yes" in place.tinker("auth", "status").out


def auth_login(place: CliServer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(place.folder))
        patch.setattr("tinker.cli.login.prompt_api_key", lambda: "tml-local")
        assert "Logged in as" in place.tinker("auth", "login").out
        assert "Already logged in" in place.tinker("auth", "login", succeeds=False).error


def auth_logout(place: CliServer) -> None:
    auth_login(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(place.folder))
        assert "Removed credential" in place.tinker("auth", "logout").out
        assert "nothing to log out" in place.tinker("auth", "logout", succeeds=False).error


def auth_whoami(place: CliServer) -> None:
    assert "tml:user:local" in place.tinker("auth", "whoami").out


def billing_usage(place: CliServer) -> None:
    today = datetime.now(UTC).date()
    window = str(today - timedelta(days=1)), str(today + timedelta(days=1))
    place.tinker("billing", "usage", *window, "--csv", str(place.folder / "usage.csv"))
    rows = list(csv.DictReader((place.folder / "usage.csv").open()))
    assert {row["type"] for row in rows} >= {"checkpoint"} and place.session_id in {row["session_id"] for row in rows}
    too_long = str(today - timedelta(days=20)), str(today)
    assert "14 days" in place.tinker("billing", "usage", *too_long, succeeds=False).error


def billing_checkpoint_storage(place: CliServer) -> None:
    place.tinker("billing", "checkpoint-storage", "--csv", str(place.folder / "storage.csv"))


def session_export_trace(place: CliServer) -> None:
    file = place.folder / "out" / "session.pftrace"
    place.tinker("session", "export-trace", place.session_id, "--output", str(file))
    trace = Trace.FromString(file.read_bytes())
    names = {packet.track_event.name for packet in trace.packet}
    assert {"create_model", "save_weights"} <= names
    url = place.tinker("session", "export-trace", place.session_id, "--url-only").out.strip()
    assert httpx.get(url).status_code == 200 and httpx.get(url.replace("session-", "session-0")).status_code == 403


COMMANDS: dict[str, Callable[[CliServer], None]] = {
    "auth login": auth_login,
    "auth logout": auth_logout,
    "auth status": auth_status,
    "auth whoami": auth_whoami,
    "billing checkpoint-storage": billing_checkpoint_storage,
    "billing usage": billing_usage,
    "checkpoint delete": checkpoint_delete,
    "checkpoint download": checkpoint_download,
    "checkpoint info": checkpoint_info,
    "checkpoint list": checkpoint_list,
    "checkpoint publish": checkpoint_publish,
    "checkpoint push-hf": checkpoint_push_hf,
    "checkpoint set-ttl": checkpoint_set_ttl,
    "checkpoint unpublish": checkpoint_unpublish,
    "model list": model_list,
    "run info": run_info,
    "run list": run_list,
    "session export-trace": session_export_trace,
    "version": version,
}


def leaves(command: click.Command, path: tuple[str, ...], context: click.Context) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from leaves(child, (*path, name), click.Context(child, parent=context))


def test_every_sdk_command_is_covered() -> None:
    assert set(leaves(main_cli, (), click.Context(main_cli))) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, place: CliServer) -> None:
    COMMANDS[command](place)
