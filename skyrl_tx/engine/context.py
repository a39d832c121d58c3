"""The components of one engine, which they share, and how the engine reports a failed request."""

import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import UNSET

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, FieldError, RequestError, ServerError
from skyrl_tx.contract.requests import ModelPass, Rejected
from skyrl_tx.contract.results import Failure
from skyrl_tx.engine.activity import DeviceClock
from skyrl_tx.engine.background_writer import BackgroundWriter, EphemeralSamplers
from skyrl_tx.engine.device_cache import ModelCache, SamplerCache
from skyrl_tx.engine.extension import Admission, ResultObservers
from skyrl_tx.engine.recovery import Recovery
from skyrl_tx.engine.request_log import DeliveryAttempts, QueuedRequest, RequestLog
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import StoreError
from skyrl_tx.store.database import Store

_log = logging.getLogger(__name__)
FATAL_ERRORS = (BackendLost, StoreError)
"""Errors that end the engine, because the device or the database is lost."""


def report_internal_error(what: str, error: Exception, about: QueuedRequest | None = None) -> ServerError:
    """Log an unexpected error. Returns the error for the client, which only refers to the log.

    The client's message has no paths and no device messages. It includes the text of a system
    error, for example "No space left on device". `about` is the request that failed.
    """
    reference = secrets.token_hex(4)
    _log.error("%s failed (reference %s)", what, reference, exc_info=error, extra=get_log_fields(about))
    number = error.errno if isinstance(error, OSError) else None
    cause = "" if number is None else f": {os.strerror(number)}"
    return ServerError(f"internal error{cause}; the server's log has it under reference {reference}")


def get_log_fields(queued: QueuedRequest | None) -> Mapping[str, str]:
    """Return the fields of a JSON log line that identify a request."""
    if queued is None:
        return {}
    fields = {"request_id": queued.request_id, "session_id": queued.session_id, "owner": queued.owner}
    return fields if queued.model_id is None else {**fields, "model_id": queued.model_id}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The components of one engine."""

    settings: EngineSettings
    backend: AbstractBackend
    device_clock: DeviceClock = field(default_factory=DeviceClock)
    capabilities: Capabilities
    store: Store
    attempts: DeliveryAttempts
    request_log: RequestLog
    background_writer: BackgroundWriter
    recovery: Recovery
    models: ModelCache
    samplers: SamplerCache
    ephemeral_samplers: EphemeralSamplers
    observers: ResultObservers
    admission: Admission

    def fail(self, queued: QueuedRequest, error: Exception) -> None:
        """Commit the failure of a request. Raises `error` instead if it must end the engine.

        A failed forward_backward makes the gradient of its model incomplete: the next optim_step
        fails and clears it.
        """
        if isinstance(error, FATAL_ERRORS):
            raise error

        # Hide the details of unexpected errors. Errors of the background thread may come from a
        # lost device.
        if not isinstance(error, RequestError):
            self.backend.check_devices()
            error = report_internal_error(f"{queued.kind} request {queued.request_id}", error, queued)
        field = error.field if isinstance(error, FieldError) else UNSET
        failure = Failure(message=error.message, category=error.category, field=field)

        # Mark the gradient as incomplete after a failed forward_backward.
        request, model_id, incomplete = queued.request, queued.model_id, None
        if model_id is not None and isinstance(request, ModelPass | Rejected) and request.backward:
            with suppress(RequestError):  # the model may not exist
                model = self.models.get(model_id)
                model.gradient_error = model.gradient_error or failure.message
                incomplete = model_id, model.gradient_error
        self.request_log.commit_failure(queued, failure, incomplete)
