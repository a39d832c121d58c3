"""The ids in a request: read first, because without them there is no future that could tell what else is wrong."""

from typing import Annotated, cast

import msgspec
from pydantic import BeforeValidator

from skyrl_tx.api.schemas.base import Int, SeqId, WireModel


def _as_text(value: object) -> object:
    """Metadata as clients read them back: values other than text become JSON."""
    if not isinstance(value, dict):
        return value
    metadata = cast(dict[str, object], value)
    return {
        name: part if isinstance(part, str) else msgspec.json.encode(part).decode() for name, part in metadata.items()
    }


Metadata = Annotated[dict[str, str] | None, BeforeValidator(_as_text)]


class ModelAddress(WireModel):
    """Which model a request is for, and its place among that model's requests."""

    model_id: str
    seq_id: SeqId | None = None


class CreationAddress(WireModel):
    """Which model of a session is to be made, and what its maker notes about it."""

    session_id: str
    model_seq_id: SeqId
    user_metadata: Metadata = None


class SampleAddress(WireModel):
    """Which sampling session a prompt is for, and its place there; or the weights themselves."""

    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: SeqId | None = None
    num_samples: Int = 1
