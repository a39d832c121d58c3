"""The list of optional features. Only this file, `apps` and `tools` import features."""

from skyrl_tx.launch.app import App

APPS: tuple[App, ...] = (
    App(name="history"),
    App(name="teams"),
    App(name="chat"),
    App(name="console"),
)
