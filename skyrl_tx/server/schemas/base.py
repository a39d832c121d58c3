"""Base classes and ids of all schemas. Requests keep unknown fields, so that they can be refused or logged."""

from datetime import UTC, datetime
from typing import Annotated, ClassVar, TypeVar, cast

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Int = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""An integer of 64 bits, which the codec, NumPy and the database can store. JSON itself has no bound."""
SeqId = Annotated[int, Field(ge=0, lt=2**63)]
"""A sequence number of a client; clones of a sampling client start at multiples of a billion."""
_MAX_METADATA_CHARS = 2**16
_MAX_NAMES = 64

ValueT = TypeVar("ValueT")
List = Annotated[list[ValueT], Field(fail_fast=True)]
"""A list of a request. Its first wrong value ends the validation: an error for each value would take a kilobyte."""


class WireModel(BaseModel):
    """An object of a request.

    SDK releases add fields and send their defaults, so unknown fields are kept in `model_extra` and are no error by
    themselves. Where `changes_maths` is true, an unknown field that is set is refused (`validation.UnknownFields`).
    Python's JSON parser accepts NaN and infinity; no field does.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)
    changes_maths: ClassVar[bool] = False


class Response(BaseModel):
    """An object of a response."""

    model_config = ConfigDict(protected_namespaces=())


Table = Annotated[dict[str, ValueT], Field(max_length=_MAX_NAMES)]
"""An object with at most 64 names of the client's choice."""


def _convert_values_to_text(value: object) -> object:
    """Convert metadata to the form in which clients read it: values other than text become JSON."""
    if not isinstance(value, dict):
        return value
    metadata = cast(dict[str, object], value)
    return {
        name: part if isinstance(part, str) else msgspec.json.encode(part).decode() for name, part in metadata.items()
    }


def _check_length(metadata: dict[str, str]) -> dict[str, str]:
    """Refuse long metadata: lists and searches read it. Raises ValueError."""
    if sum(len(name) + len(text) for name, text in metadata.items()) > _MAX_METADATA_CHARS:
        raise ValueError(f"must have at most {_MAX_METADATA_CHARS} characters in all")
    return metadata


TextMetadata = Annotated[dict[str, str], AfterValidator(_check_length)]
Metadata = Annotated[TextMetadata, BeforeValidator(_convert_values_to_text)]
"""Metadata of sessions and runs, whose values other than text are converted."""
Name = Annotated[str, Field(max_length=200)]
"""A name that is stored with a session."""


class ModelRequestIds(WireModel):
    """The model and the sequence number of a request. `type` is a constant of the SDK.

    Ids are parsed before everything else: without them there is no future that could report an error.
    """

    model_id: str
    seq_id: SeqId | None = None
    type: str | None = None


class CreationIds(WireModel):
    """The session and number of a model to create, and its metadata."""

    session_id: str
    model_seq_id: SeqId
    user_metadata: Metadata | None = None


class SampleRequestIds(WireModel):
    """The sampling session and the sequence number of a prompt; or the weights, without a sampling session."""

    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: SeqId | None = None
    num_samples: Int = 1


def to_utc_time(seconds: float) -> datetime:
    """Convert seconds since the epoch to a time that JSON shows in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
