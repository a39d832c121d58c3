"""The commands about owners: their usage, projects, quotas and the audit log."""

from skyrl_tx.launch.command import Command

COMMANDS = (
    Command(
        name="usage",
        help="show the tokens, device seconds and storage of owners, projects, keys, runs or days",
        group="administration",
        code="skyrl_tx.apps.teams.commands.usage:add_arguments",
    ),
    Command(
        name="projects",
        help="list projects; set and remove their members",
        group="administration",
        code="skyrl_tx.apps.teams.commands.projects:add_arguments",
    ),
    Command(
        name="quotas",
        help="list, set and remove quotas and the weights of owners",
        group="administration",
        code="skyrl_tx.apps.teams.commands.quotas:add_arguments",
    ),
    Command(
        name="audit",
        help="show who did what to checkpoints, keys, quotas and projects",
        group="administration",
        code="skyrl_tx.apps.teams.commands.audit:add_arguments",
    ),
)
