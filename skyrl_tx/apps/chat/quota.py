"""Refuse the calls of an owner that has used up its quota of sample tokens for today."""

from collections.abc import Collection
from http import HTTPStatus

from skyrl_tx.server.errors import ApiError
from skyrl_tx.store.engine_state import Pause


def find_sample_pause(pauses: Collection[Pause], owner: str) -> Pause | None:
    """Return the pause of an owner's samples, or None if the owner's quota is not used up."""
    return next(
        (
            pause
            for pause in pauses
            if pause.limit == "sample_tokens_per_day" and (pause.subject_kind, pause.subject) == ("owner", owner)
        ),
        None,
    )


def make_refusal(pause: Pause) -> ApiError:
    """Return the error 429 for a call that would have to wait until the end of a pause."""
    # Without this `X-Should-Retry`, the OpenAI and Anthropic clients would retry until the quota is
    # reset at the end of the day
    headers = {"Retry-After": "60", "X-Should-Retry": "false"}
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, pause.reason, headers, reason="quota")
