"""The list of optional features. Only this file, `apps` and `tools` import features."""

from skyrl_tx.apps.teams.prices import TeamsSettings
from skyrl_tx.launch.app import App

APPS: tuple[App, ...] = (
    App(name="history"),
    App(name="teams", settings=TeamsSettings),
    App(name="chat"),
    App(name="console"),
)
APP_SETTINGS = tuple(app.settings for app in APPS if app.settings is not None)
