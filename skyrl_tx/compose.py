"""The optional features (apps) of the server.

Only this file, `apps` and `tools` may import them.
"""

from skyrl_tx.apps.chat import CHAT
from skyrl_tx.apps.console import CONSOLE
from skyrl_tx.apps.history import HISTORY
from skyrl_tx.apps.teams import TEAMS
from skyrl_tx.launch.command import App

APPS: tuple[App, ...] = (HISTORY, TEAMS, CHAT, CONSOLE)
APP_SETTINGS = tuple(app.settings for app in APPS if app.settings is not None)
