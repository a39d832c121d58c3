"""The commands for usage, projects, quotas and the audit log."""

from skyrl_tx.launch.command import Command

COMMANDS = (
    Command(
        name="usage",
        help="show tokens, device seconds and storage by owner, project, key, session, run or day",
        group="administration",
        entry_point="skyrl_tx.apps.teams.commands.usage:add_arguments",
    ),
    Command(
        name="projects",
        help="list projects, and add or remove their members",
        group="administration",
        entry_point="skyrl_tx.apps.teams.commands.projects:add_arguments",
    ),
    Command(
        name="quotas",
        help="list, set and remove quotas and fair-share weights of owners",
        group="administration",
        entry_point="skyrl_tx.apps.teams.commands.quotas:add_arguments",
    ),
    Command(
        name="audit",
        help="show the audit log of checkpoints, keys, quotas and projects",
        group="administration",
        entry_point="skyrl_tx.apps.teams.commands.audit:add_arguments",
    ),
)
