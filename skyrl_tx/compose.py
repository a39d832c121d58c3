"""The list of optional features. Only this file, `apps` and `tools` import features."""

from skyrl_tx.apps import history, teams
from skyrl_tx.launch.app import App

APPS: tuple[App, ...] = (
    history.APP,
    teams.APP,
    App(name="chat"),
    App(name="console"),
)
