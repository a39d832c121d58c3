"""Fixtures that several rooms share."""

from collections.abc import Callable

import pytest

from skyrl_tx.testing.client_environments import (
    ClientEnvironment,
    PreparedEnvironment,
    UnavailableEnvironment,
    is_required,
    prepare,
)


@pytest.fixture(scope="session")
def client_environment() -> Callable[[ClientEnvironment], PreparedEnvironment]:
    """Give environments by recipe, made at most once a session; a test skips, with the reason, when it cannot be."""
    outcomes: dict[ClientEnvironment, PreparedEnvironment | str] = {}

    def get(recipe: ClientEnvironment) -> PreparedEnvironment:
        if recipe not in outcomes:
            try:
                outcomes[recipe] = prepare(recipe)
            except UnavailableEnvironment as error:
                outcomes[recipe] = str(error)
        outcome = outcomes[recipe]
        if isinstance(outcome, str):
            (pytest.fail if is_required() else pytest.skip)(outcome)
        return outcome

    return get
