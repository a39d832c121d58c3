"""The list of optional features. Only this file, `apps` and `tools` import features."""

from skyrl_tx.apps.teams.commands import COMMANDS as TEAMS_COMMANDS
from skyrl_tx.launch.app import App

APPS: tuple[App, ...] = (
    App(name="history"),
    App(name="teams", commands=TEAMS_COMMANDS),
    App(name="chat"),
    App(name="console"),
)
