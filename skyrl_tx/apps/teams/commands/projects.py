"""`skyrl-tx projects`: list projects, and add or remove their members."""

import argparse
import time
from typing import get_args

from sqlmodel import Session

from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import Record, finish_list_parser, finish_parser, get_os_user, open_database
from skyrl_tx.store import audit, projects
from skyrl_tx.store.tables import ProjectRole

_MAX_LISTED = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show all projects and their members")
    finish_list_parser(listing, _read_records, nothing="no projects")

    setting = actions.add_parser(
        "set",
        help="give an owner a role in a project",
        description="Give an owner a role in a project. A running server applies it immediately.",
    )
    _add_names(setting)
    setting.add_argument(
        "role",
        metavar="ROLE",
        choices=get_args(ProjectRole),
        help="viewer (can see sessions and runs, and use checkpoints) or editor (can also change checkpoints and add "
        "sessions)",
    )
    finish_parser(setting, _set)

    removing = actions.add_parser("remove", help="remove an owner from a project")
    _add_names(removing)
    finish_parser(removing, _remove)


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("project", metavar="PROJECT", help="name of the project, as sessions use it")
    parser.add_argument("owner", metavar="OWNER", help="name of the owner, as keys use it")


def _read_records(tx: Session, arguments: argparse.Namespace) -> list[Record]:
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


def _set(arguments: argparse.Namespace) -> None:
    _put(arguments, arguments.role)
    print(f"{arguments.owner} is {arguments.role} of {arguments.project}")


def _remove(arguments: argparse.Namespace) -> None:
    if not _put(arguments, None):
        raise CommandError(
            f"{arguments.owner} is not a member of {arguments.project}; `skyrl-tx projects list` shows the members"
        )
    print(f"removed {arguments.owner} from {arguments.project}")


def _put(arguments: argparse.Namespace, role: ProjectRole | None) -> bool:
    with open_database(arguments) as store:
        return store.write(
            lambda tx: projects.put_member(
                tx, arguments.project, arguments.owner, role, audit.OPERATOR, time.time(), os_user=get_os_user()
            )
        )
