"""What every part of the engine works with."""

import logging
from dataclasses import dataclass

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, ErrorCategory, RequestError, ServerError
from skyrl_tx.contract.requests import ModelPass, Rejected
from skyrl_tx.contract.results import Failure
from skyrl_tx.engine.answers import Answer, Answers, failure_of
from skyrl_tx.engine.attempts import Attempts
from skyrl_tx.engine.jobs import Jobs
from skyrl_tx.engine.presence import Presence
from skyrl_tx.engine.recovery import Recovery
from skyrl_tx.engine.residency import Models, Samplers
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.engine.unnamed import WriteBehind
from skyrl_tx.engine.work import Work
from skyrl_tx.store import models
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError

_log = logging.getLogger(__name__)
ENDS_ENGINE = (BackendLost, StoreError)
"""What is no single request's failure: the device or the database is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The engine's parts, by name."""

    settings: EngineSettings
    backend: AbstractBackend
    capabilities: Capabilities
    store: Store
    attempts: Attempts
    answers: Answers
    jobs: Jobs
    recovery: Recovery
    models: Models
    samplers: Samplers
    behind: WriteBehind
    presence: Presence

    def attempt(self, works: list[Work]) -> list[Work]:
        """Note on disk that these are begun; those that ended too many engines are answered, the others returned.

        What files are being written is waited for before a suspect is begun: nothing else may be under way then.
        """
        if any(work.is_suspect for work in works):
            self.jobs.finish(wait=True)
        fit: list[Work] = []
        for work in works:
            if work.attempts < self.settings.max_attempts:
                fit.append(work)
            else:
                self.fail(work, ServerError(f"given up: the engine ended {work.attempts} times while it ran this"))
        if fit:
            self.attempts.mark([work.request_id for work in fit])
        return fit

    def fail(self, work: Work, error: Exception) -> None:
        """Answer with a failure; a gradient that is missing because of it poisons the model's next optim_step."""
        if isinstance(error, ENDS_ENGINE):
            raise error
        if not isinstance(error, RequestError):
            _log.error("%s request %s failed", work.kind, work.request_id, exc_info=error)
        self.refuse(work, failure_of(error), poisons=_has_gradient(work))

    def refuse(self, work: Work, failure: Failure, *, poisons: bool = False) -> None:
        """Answer with a failure."""
        model_id = work.model_id
        if not poisons or model_id is None:
            self.answers.give([Answer(work=work, result=failure)])
            return
        try:
            model = self.models.get(model_id)
        except RequestError:  # there is no model to poison
            self.answers.give([Answer(work=work, result=failure)])
            return
        model.poisoned_by = cause = model.poisoned_by or failure.message
        self.answers.give([Answer(work=work, result=failure)], lambda tx: models.set_poison(tx, model_id, cause))

    def user_failure(self, work: Work, message: str) -> None:
        """Answer that the caller made a mistake which costs no gradient."""
        self.refuse(work, Failure(message=message, category=ErrorCategory.USER))


def _has_gradient(work: Work) -> bool:
    return isinstance(work.request, ModelPass | Rejected) and work.request.backward
