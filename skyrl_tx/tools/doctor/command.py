"""The command `skyrl-tx doctor`: runs all checks, and prints what they find as text or as JSON."""

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
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError
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
    "devices": machine.check_devices,
    "tokenizer": machine.check_text,
    "database": database.check_database,
}


_NEED_MODEL = frozenset({"tokenizer"})


_REPORT = "this is an error of skyrl-tx: please report it with this text"


def add_arguments(parser: CommandParser) -> None:
    """Add the command's own flags, and those of `serve`."""
    parser.usage = "skyrl-tx doctor [--base-model MODEL] [flags]"
    parser.description = (
        "Examine what a server needs: devices and memory for the model, packages, limits, disk, access, "
        "tokenizer, chat template, database, and the weight files of a data directory. Works while a server runs, and "
        "changes nothing, except with --remove-unclaimed; an object store gets a small object for a moment. Takes all "
        "flags of `skyrl-tx serve` too, so give it those of the server, or its --config. The exit status is 0 if all "
        "is well, 1 for warnings, 2 for errors."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all artifacts")
    parser.add_argument("--no-hashes", action="store_true", help="do not read the weight files to check their hashes")
    parser.add_argument(
        "--remove-unclaimed",
        action="store_true",
        help="move artifacts to the trash whose rows the database does not have, because it was lost or is older",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    read = add_settings(parser, {"base_model": ""})
    parser.set_defaults(run=lambda arguments: run(arguments, read(arguments)))


def run(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    """Run the command; return its exit status."""
    if arguments.remove_unclaimed:
        return _remove_unclaimed(settings, is_confirmed=arguments.yes)
    with _write_model(settings) as examined:
        subject = ExaminedServer(examined, _find_server_pids(settings.data_dir))
        checks = [(name, check) for name, check in _CHECKS.items() if name not in _NEED_MODEL or _has_text(settings)]
        findings = [finding for name, check in checks for finding in _run_check(name, check, subject)]
    report: storage.ArtifactReport | None = None
    with ExitStack() as stack:
        store = None
        if database.is_current(settings):  # opening another one would migrate it
            try:
                store = stack.enter_context(closing(_open_store(settings)))
            except StoreError as problem:
                findings.append(error("database", str(problem), "see the guide: run in production"))
        findings += database.check_access(settings, store)
        if store is not None:
            try:
                report = storage.examine_artifacts(
                    store, _open_artifacts(settings), with_hashes=not arguments.no_hashes
                )
                findings += storage.check_artifacts(report)
            except (ArtifactsUnreachable, InvalidLocation):
                pass  # an error of "storage" says so
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
    """Write a built-in model into a temporary directory if the settings name it; a server keeps it with its data."""
    name = settings.base_model
    with open_built_in_model(name) as written:
        changes = {} if written == name else {"base_model": written, "served_model_name": name}
        yield settings.model_copy(update=changes)


def _has_text(settings: ServerSettings) -> bool:
    """Whether a model with files was named."""
    return bool(settings.base_model) and settings.backend != "fake"


def _find_server_pids(data_dir: Path) -> dict[str, int]:
    try:
        found = {role: find_process(data_dir / f"{role}.lock") for role in ("api", "engine")}
    except CommandError:  # of another user
        return {}
    return {role: pid for role, pid in found.items() if pid is not None}


def _run_check(name: str, check: Check, subject: ExaminedServer) -> list[Finding]:
    """Return the findings of a check, or what failed in it, so that one check never hides the others."""
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


def _remove_unclaimed(settings: ServerSettings, *, is_confirmed: bool) -> int:
    if not database.is_current(settings):
        raise CommandError(f"--data-dir {settings.data_dir}: no database of this release", STATUS["error"])
    try:
        with closing(_open_store(settings)) as store:
            return storage.remove_unclaimed(store, _open_artifacts(settings), is_confirmed=is_confirmed)
    except (CommandError, StoreError, ArtifactsUnreachable, InvalidLocation) as problem:
        raise CommandError(str(problem), STATUS["error"]) from problem
