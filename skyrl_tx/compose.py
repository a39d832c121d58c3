"""The list of optional features. Only this file, `apps` and `tools` import features."""

from skyrl_tx.apps.teams.app import TEAMS
from skyrl_tx.launch.app import App

APPS: tuple[App, ...] = (
    App(name="history"),
    TEAMS,
    App(name="chat"),
    App(name="console"),
)
