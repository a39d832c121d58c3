"""The commands `skyrl-tx usage`, `projects`, `quotas` and `audit`."""

import argparse
import csv
import json
import sys
import time
from dataclasses import asdict
from typing import get_args

from pydantic import ValidationError
from sqlmodel import Session

from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.prices import Prices, TeamsSettings
from skyrl_tx.apps.teams.quotas import (
    ANY,
    DAY_LIMITS,
    LIMITS,
    WEIGHT,
    Subject,
    format_amount,
    parse_amount,
    read_quota_uses,
)
from skyrl_tx.apps.teams.usage_report import SUBJECTS, UsageLine, read_usage_lines
from skyrl_tx.launch.command import CommandError, suggest
from skyrl_tx.launch.command_line import (
    Record,
    add_since,
    finish_list_parser,
    finish_parser,
    format_table,
    format_time,
    get_os_user,
    open_database,
    parse_path,
)
from skyrl_tx.launch.settings import SettingsError, check_file, read_config_file
from skyrl_tx.store import audit, keys, projects
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import OverQuota, ProjectRole

_MAX_LISTED = 100_000
_SUBJECT = (
    "an owner, key:NUMBER or project:NAME; use '*', 'key:*' or 'project:*' for all owners, keys or projects that have "
    "no quota themselves"
)
_WEIGHT = (
    f"{WEIGHT}, for an owner (1 to {quotas.MAX_WEIGHT}, default 1): while two owners have work, an owner with weight 2 "
    "gets twice the device time of an owner with weight 1; with weight 0, an owner runs only while no other has work"
)
_LIMIT = f"{', '.join(LIMITS)}; or {_WEIGHT}"


def add_usage(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `skyrl-tx usage`."""
    parser.add_argument("--by", choices=SUBJECTS, default="owner", help="what to show in each line (default: owner)")
    add_since(parser, days=30)
    parser.add_argument("--owner", help="show only the usage of this owner")
    parser.add_argument(
        "--config", type=parse_path, metavar="FILE", help="the server's YAML file; costs are computed from its `prices`"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    finish_parser(parser, _show_usage)


def _show_usage(arguments: argparse.Namespace) -> None:
    prices, since = _read_prices(arguments), time.time() - arguments.since
    with open_database(arguments) as store:
        lines = store.read(lambda tx: read_usage_lines(tx, arguments.owner, arguments.by, since, prices))

    records = [{arguments.by: line.subject, **_make_record(line)} for line in lines]
    if arguments.json:
        print(json.dumps(records, indent=2))
    elif arguments.csv:
        writer = csv.DictWriter(sys.stdout, [arguments.by, *_make_record(UsageLine(subject=""))], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    else:
        print("\n".join(format_table(records)) if records else "no usage")
        if records and prices == Prices():
            missing = "needs the server's YAML file, with its `prices`"
            if arguments.config is not None:
                missing = f"{arguments.config} has no `prices`"
            print(f"without costs: --config {missing}", file=sys.stderr)


def _make_record(line: UsageLine) -> Record:
    values: Record = {
        **asdict(line),
        "device_s": round(line.device_s, 1),
        "gigabyte_hours": round(line.gigabyte_hours, 3),
    }
    del values["subject"]
    if line.cost_usd is not None:
        values["cost_usd"] = round(line.cost_usd, 4)
    return values


def _read_prices(arguments: argparse.Namespace) -> Prices:
    if arguments.config is None:
        return Prices()
    try:
        values = read_config_file(arguments.config)
        # Check only names like `prices`: the file may have settings of a backend that is not installed here.
        own = {name: value for name, value in values.items() if suggest(name, TeamsSettings.model_fields)}
        check_file(TeamsSettings, own, f"--config {arguments.config}")
        return Prices.model_validate(values.get("prices") or {})
    except SettingsError as error:
        raise CommandError(str(error)) from error
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, ("prices", *problem["loc"])))
        raise CommandError(f"--config {arguments.config}: {name}: {problem['msg']}") from error


def add_projects(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `skyrl-tx projects`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show all projects and their members")
    finish_list_parser(listing, _list_projects, nothing="no projects")

    setting = actions.add_parser(
        "set",
        help="give an owner a role in a project",
        description="Give an owner a role in a project. A running server applies it immediately.",
    )
    _add_member(setting)
    setting.add_argument(
        "role",
        metavar="ROLE",
        choices=get_args(ProjectRole),
        help="viewer (can see sessions and runs, and use checkpoints) or editor (can also change checkpoints and add "
        "sessions)",
    )
    finish_parser(setting, _set_member)

    removing = actions.add_parser("remove", help="remove an owner from a project")
    _add_member(removing)
    finish_parser(removing, _remove_member)


def _add_member(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("project", metavar="PROJECT", help="name of the project, as sessions use it")
    parser.add_argument("owner", metavar="OWNER", help="name of the owner, as keys use it")


def _list_projects(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    return [
        {
            "project": project.project_id,
            "sessions": project.num_sessions,
            "runs": project.num_runs,
            "members": {row.owner: row.role for row in project.members}
            if arguments.json
            else ", ".join(f"{row.owner} ({row.role})" for row in project.members) or None,
        }
        for project in projects.list_visible(tx, None, _MAX_LISTED)
    ]


def _set_member(arguments: argparse.Namespace) -> None:
    _put_member(arguments, arguments.role)
    print(f"{arguments.owner} is {arguments.role} of {arguments.project}")


def _remove_member(arguments: argparse.Namespace) -> None:
    if not _put_member(arguments, None):
        raise CommandError(
            f"{arguments.owner} is not a member of {arguments.project}; `skyrl-tx projects list` shows the members"
        )
    print(f"removed {arguments.owner} from {arguments.project}")


def _put_member(arguments: argparse.Namespace, role: ProjectRole | None) -> bool:
    with open_database(arguments) as store:
        return store.write(
            lambda tx: projects.put_member(
                tx, arguments.project, arguments.owner, role, audit.OPERATOR, time.time(), os_user=get_os_user()
            )
        )


def add_quotas(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `skyrl-tx quotas`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show all quotas and how much of them is used")
    finish_list_parser(listing, _list_quotas, nothing="no quotas")

    setting = actions.add_parser(
        "set",
        help="set a quota, or an owner's weight",
        description="Set a quota, or an owner's weight. A running server applies it within about a second.",
    )

    setting.add_argument("subject", metavar="SUBJECT", help=_SUBJECT)
    setting.add_argument("limit", metavar="LIMIT", help=_LIMIT)
    setting.add_argument(
        "value", metavar="VALUE", help="a whole number, or a number with a decimal unit, for example 200M or 5G"
    )
    setting.add_argument(
        "--over",
        choices=get_args(OverQuota),
        default="wait",
        help="whether requests beyond a daily quota wait until 00:00 UTC (default) or fail",
    )
    finish_parser(setting, _set_quota)

    removing = actions.add_parser("remove", help="remove a quota, or an owner's weight")
    removing.add_argument("subject", metavar="SUBJECT", help=_SUBJECT)
    removing.add_argument("limit", metavar="LIMIT", help="the name of a limit, or 'weight'")
    finish_parser(removing, _remove_quota)


def _list_quotas(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    now = time.time()
    used = {
        (use.quota.subject, use.quota.limit): use.used for use in read_quota_uses(tx, quotas.read_rules(tx), None, now)
    }

    records: list[Record] = []
    for row in quotas.list_rows(tx):
        subject = Subject(row.subject_kind, row.subject)
        amount = used.get((subject, row.name))  # pyright: ignore[reportArgumentType]
        records.append(
            {
                "subject": str(subject),
                "limit": row.name,
                "value": row.value if arguments.json else format_amount(row.value),
                "over": row.over if row.name in DAY_LIMITS else None,
                "used": amount if arguments.json or amount is None else format_amount(amount),
            }
        )
    return records


def _set_quota(arguments: argparse.Namespace) -> None:
    value = parse_amount(arguments.value)
    _change_quota(arguments, value)
    consequence = "" if arguments.over == "wait" else "; requests beyond it fail"
    print(f"{arguments.limit} of {arguments.subject} is {format_amount(value)}{consequence}")


def _remove_quota(arguments: argparse.Namespace) -> None:
    if not _change_quota(arguments, None):
        raise CommandError(f"{arguments.subject} has no {arguments.limit}; `skyrl-tx quotas list` shows all")
    print(f"removed {arguments.limit} of {arguments.subject}")


def _change_quota(arguments: argparse.Namespace, value: int | None) -> bool:
    """Set a quota or a weight, or remove it if `value` is None. Returns False if there was nothing to remove."""
    subject, limit = Subject.parse(arguments.subject), arguments.limit
    over: OverQuota = "wait" if value is None else arguments.over
    quotas.check_quota(subject, limit, value, over)
    with open_database(arguments) as store:
        if value is not None:
            _check_subject(store, subject)
        return store.write(
            lambda tx: quotas.put(
                tx, subject, limit, value, audit.OPERATOR, time.time(), over=over, os_user=get_os_user()
            )
        )


def _check_subject(store: Store, subject: Subject) -> None:
    """Raise CommandError if a subject is a key that does not exist. Print a note about an owner without keys."""
    all_keys = store.read(keys.list_all)
    if subject.kind == "key" and subject.name not in (ANY, *(str(row.key_id) for row in all_keys)):
        raise CommandError(f"there is no key {subject.name}; `skyrl-tx keys list` shows all keys")
    if subject.kind == "owner" and subject.name not in (ANY, *(row.owner for row in all_keys)):
        print(f"note: {subject.name} has no API key; `skyrl-tx keys list` shows all owners", file=sys.stderr)


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `skyrl-tx audit`."""
    add_since(parser, days=7)
    parser.add_argument(
        "--actor", help="show only actions of this owner, or of 'operator' (commands on the server's machine)"
    )
    events = get_args(audit.Event)
    parser.add_argument(
        "--event", choices=events, metavar="EVENT", help=f"show only one kind of event: {', '.join(events)}"
    )
    finish_list_parser(parser, _list_entries, nothing="no entries")


def _list_entries(tx: Session, arguments: argparse.Namespace) -> list[Record]:
    since = time.time() - arguments.since
    newest = audit.list_entries(
        tx, since=since, actor=arguments.actor, event=arguments.event, limit=_MAX_LISTED, newest_first=True
    )

    return [
        {
            "at": format_time(row.at),
            "event": row.event,
            "actor": row.actor,
            "key": row.key_id,
            "path": row.path,
            "details": row.details
            if arguments.json
            else " ".join(f"{name}={value}" for name, value in row.details.items()) or None,
        }
        for row in reversed(newest)
    ]
