"""Environment variables in the files of `deploy` must be settings of the server."""

from collections.abc import Mapping

from skyrl_tx.backends.registry import find_backend
from skyrl_tx.compose import APP_SETTINGS
from skyrl_tx.launch.settings import DEFAULT_BACKEND, check_environment, make_settings_class


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise SettingsError for a variable that is no setting. Assert that none of the settings was removed."""
    settings = make_settings_class(find_backend(DEFAULT_BACKEND), {}, apps=APP_SETTINGS)
    assert check_environment(settings, variables) == []
