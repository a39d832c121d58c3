"""The tab of a run with its samples: which step, which group, and the texts."""

from functools import lru_cache
from typing import Any

from skyrl_tx.apps.console.queries import RunLine
from skyrl_tx.apps.console.tokenizer import TextDecoder
from skyrl_tx.apps.console.views.samples import groups
from skyrl_tx.apps.console.visit import Visit
from skyrl_tx.apps.history import kept_samples

_MAX_STEPS = 200
_MAX_GROUPS = 64


def owner_of_samples(visit: Visit, line: RunLine) -> str | None:
    """Return the owner whose samples of a run are shown; None means all owners."""
    return None if visit.caller.is_admin else line.owner


_decoder = lru_cache(maxsize=4)(TextDecoder)


def values(visit: Visit, line: RunLine) -> dict[str, Any]:
    """Return what the template of the tab shows: the samples of `?step=`, by default of the newest."""
    owner = owner_of_samples(visit, line)
    kept = visit.read(lambda tx: kept_samples.steps(tx, line.model_id, owner, _MAX_STEPS))
    # Step n trains on what the weights after n - 1 optimizer steps made.
    steps = [(number + 1, count) for number, count in kept if number is not None]
    step = visit.whole("step", steps[0][0] if steps else 0)
    rows = visit.read(lambda tx: kept_samples.of_step(tx, line.model_id, step - 1, _MAX_GROUPS, owner=owner))
    found = groups(rows, _decoder(visit.context.settings.base_model))
    group = visit.whole("group", 0, most=_MAX_GROUPS)
    return {
        "sample_steps": steps,
        "step": step,
        "groups": [each for each in found if group in (0, each.number)],
        "num_groups": len(found),
        "group": group,
        "num_samples": sum(len(each.samples) for each in rows),
    }
