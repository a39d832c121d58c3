"""The other users of the device, under names that the reader may see."""

from collections.abc import Callable, Sequence

from sqlmodel import Session

from skyrl_tx.apps.history.curves.hints import DeviceUser
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Total
from skyrl_tx.contract.ids import ModelId

OTHERS = "other owners"


def device_users(
    tx: Session, since: float, model_id: ModelId, owner: str, may_see: Callable[[str], bool]
) -> Sequence[DeviceUser]:
    """Return the users of the device since a time other than a run of an owner, those who used it most first."""
    return named_users(usage.totals(tx, None, since, ("owner", "model_id")), model_id, owner, may_see)


def named_users(totals: Sequence[Total], model_id: str, owner: str, may_see: Callable[[str], bool]) -> list[DeviceUser]:
    """Add up device seconds by owner and model: other runs of the owner by their ids, other owners by their names.

    Those whose names the reader may not see are one user.
    """
    seconds: dict[str, float] = {}
    for total in totals:
        who, model = total.group
        if who == owner and model == model_id:
            continue
        if who != owner:
            name = str(who) if may_see(who) else OTHERS
        else:
            name = f"{owner}'s run {model}" if model else f"{owner}'s samples of base weights"
        seconds[name] = seconds.get(name, 0.0) + total.device_s
    users = [DeviceUser(name, device_s) for name, device_s in seconds.items() if device_s > 0]
    return sorted(users, key=lambda user: (-user.device_s, user.name))
