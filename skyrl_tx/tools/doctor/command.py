"""The command `skyrl-tx doctor`: runs all checks and prints their findings as text or as JSON."""

import argparse
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from skyrl_tx.artifacts import ArtifactStore, ArtifactsUnreachable, InvalidLocation, open_artifacts
from skyrl_tx.launch.command import CommandError, CommandParser
from skyrl_tx.launch.command_line import format_table
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.store import StoreError
from skyrl_tx.store.database import Store
from skyrl_tx.tools.commands.status import find_process
from skyrl_tx.tools.doctor import database, machine, storage
from skyrl_tx.tools.doctor.findings import STATUS, ExaminedServer, Finding, error, format_findings, get_worst_level
from skyrl_tx.tools.quickstart.model import open_built_in_model
from skyrl_tx.tools.serve import add_settings

Check = Callable[[ExaminedServer], Iterator[Finding]]

_CHECKS: dict[str, Check] = {
    "packages": machine.check_packages,
    "limits": machine.check_limits,
    "disk": storage.check_data_dir,
    "cache": storage.check_compile_cache,
    "storage": storage.check_object_store,
    "model": machine.check_model_name,
    "devices": machine.check_devices,
    "tokenizer": machine.check_text,
    "database": database.check_database,
}
_REPORT = "this is a bug in skyrl-tx; please report it with this message"


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `doctor` and of `serve`."""
    parser.usage = "skyrl-tx doctor [--base-model MODEL] [flags]"
    parser.description = (
        "Check what a server needs: devices and memory for the model, packages, system limits, disk, access, "
        "tokenizer, chat template, database, and the weights in the data directory. The server may be running. The "
        "command changes nothing except with --remove-unclaimed, but it briefly writes a small object to the object "
        "store, if one is used. It also accepts all flags of `skyrl-tx serve`: pass the flags of your server, or its "
        "--config. The exit status is 0 if everything is fine, 1 for warnings, and 2 for errors."
    )

    parser.add_argument("--json", action="store_true", help="print JSON, including all artifacts")
    parser.add_argument(
        "--no-hashes", action="store_true", help="skip the hashes of the weight files, which take long to check"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="also train and sample with the model tiny on the devices, which takes about a minute on a GPU",
    )

    parser.add_argument(
        "--remove-unclaimed",
        action="store_true",
        help="move all artifacts that the database does not know to the trash, instead of running the checks",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    read = add_settings(parser, {"base_model": ""})
    parser.set_defaults(run=lambda arguments: run(arguments, read(arguments)))


def run(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    """Run the checks, print their findings, and return the exit status."""
    if arguments.remove_unclaimed:
        _remove_unclaimed(settings, is_confirmed=arguments.yes)
        return 0

    # Checks that only read the settings and the machine.
    with _write_model(settings) as examined:
        subject = ExaminedServer(examined, _find_server_pids(settings.data_dir))
        checks = _CHECKS | ({"smoke": machine.check_computation} if arguments.smoke else {})
        findings = [finding for name, check in checks.items() for finding in _run_check(name, check, subject)]

    # Checks that open the database, if this release can use it.
    report: storage.ArtifactReport | None = None
    with ExitStack() as stack:
        store = None
        if database.is_current(settings):
            try:
                store = stack.enter_context(closing(_open_store(settings)))
            except StoreError as problem:
                findings.append(error("database", str(problem), "see the guide on running in production"))
        findings += database.check_access(settings, store)

        if store is not None:
            try:
                report = storage.examine_artifacts(
                    store, _open_artifacts(settings), with_hashes=not arguments.no_hashes
                )
                findings += storage.check_artifacts(report)
            except (ArtifactsUnreachable, InvalidLocation):
                pass  # the check "storage" has reported it

    # Print the findings.
    level = get_worst_level(findings)
    if arguments.json:
        content = {"level": level, "findings": [asdict(finding) for finding in findings]}
        if report is not None:
            content |= {"artifacts": report.records, "trash": report.num_trashed}
        print(json.dumps(content, indent=2))
    else:
        _print(findings, report)
    return STATUS[level]


@contextmanager
def _write_model(settings: ServerSettings) -> Generator[ServerSettings]:
    """Yield the settings with `tiny`, or another built-in model, replaced by a temporary directory with its files."""
    name = settings.base_model
    with open_built_in_model(name) as written:
        changes = {} if written == name else {"base_model": written, "served_model_name": name}
        yield settings.model_copy(update=changes)


def _find_server_pids(data_dir: Path) -> dict[str, int]:
    try:
        pids = {role: find_process(data_dir / f"{role}.lock") for role in ("api", "engine")}
    except CommandError:  # the server runs as another user
        return {}
    return {role: pid for role, pid in pids.items() if pid is not None}


def _run_check(name: str, check: Check, subject: ExaminedServer) -> list[Finding]:
    """Return the findings of a check. An exception becomes a finding, so that the other checks still run."""
    findings: list[Finding] = []
    try:
        findings.extend(check(subject))
    except Exception as problem:
        findings.append(error(name, f"the check failed: {type(problem).__name__}: {problem}", _REPORT))
    return findings


def _print(findings: list[Finding], report: storage.ArtifactReport | None) -> None:
    print("\n".join(format_findings(findings)))
    notable = [] if report is None else [record for record in report.records if record["state"] != "ok"]
    if notable:
        print("\n".join(["", *format_table(notable)]))
    counts = [sum(finding.level == level for finding in findings) for level in ("error", "warning")]
    print(f"\n{counts[0]} errors, {counts[1]} warnings")


def _open_store(settings: ServerSettings) -> Store:
    return Store.open(settings.data_dir, role="tool", url=settings.store_url)


def _open_artifacts(settings: ServerSettings) -> ArtifactStore:
    return open_artifacts(settings.data_dir, settings.artifacts, is_recorded=False)


def _remove_unclaimed(settings: ServerSettings, *, is_confirmed: bool) -> None:
    if not database.is_current(settings):
        raise CommandError(f"--data-dir {settings.data_dir} has no database of this release", STATUS["error"])
    try:
        with closing(_open_store(settings)) as store:
            storage.remove_unclaimed(store, _open_artifacts(settings), is_confirmed=is_confirmed)
    except (CommandError, StoreError, ArtifactsUnreachable, InvalidLocation) as problem:
        raise CommandError(str(problem), STATUS["error"]) from problem
