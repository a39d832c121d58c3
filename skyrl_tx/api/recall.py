"""Passes that name the samples they came from, completed with what was recorded of those."""

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from skyrl_tx.api.principal import Principal
from skyrl_tx.api.translate import provenance
from skyrl_tx.api.translate.translated import Translated, rejected
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import ModelPass
from skyrl_tx.store import stability
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A pass ready to be stored, and the sequences that it makes use of."""

    request: Translated
    sequence_ids: Collection[str] = ()


class Recall:
    """Looks sequences up; says once in the log that the loss which needs them is our own definition."""

    def __init__(self) -> None:
        self._is_announced = threading.Lock()

    def complete(self, store: Store, caller: Principal, request: Translated) -> Recalled:
        """Fill in what a pass needs of its samples; one whose spans are not true will fail with the reason."""
        if not request.provenance or not isinstance(request.request, ModelPass):
            return Recalled(request)
        if self._is_announced.acquire(blocking=False):  # never released: the first caller is the only one
            _log.info(
                "%s is used: Tinker's formula is not public, this is our own definition, see the README",
                provenance.NEEDS_PROVENANCE,
            )
        wanted = set[str]().union(*(datum.sequence_ids for datum in request.provenance))
        recorded = store.read(lambda tx: stability.find(tx, caller.reach, wanted, time.time()))
        try:
            completed = provenance.filled(request.request, request.provenance, recorded)
        except UserError as error:
            reason = rejected("model_pass", error.message, backward=request.request.backward)
            return Recalled(replace(request, request=reason.request))
        return Recalled(replace(request, request=completed), recorded.keys())
