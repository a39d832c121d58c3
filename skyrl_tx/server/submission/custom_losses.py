"""Whether this server evaluates losses that clients upload."""

from skyrl_tx.server.context import Call
from skyrl_tx.store import engine_state


def are_offered(call: Call) -> bool:
    """Whether the engine's backend evaluates custom losses and the operator lets it; False while no engine ever ran."""
    if call.settings.no_custom_losses:
        return False
    state = call.store.read(engine_state.get)
    return state is not None and state.capabilities.get("custom_losses") is True
