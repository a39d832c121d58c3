"""Base classes, field types and ids that the schemas share.

Requests keep unknown fields, so that the server can refuse or log them.
"""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from skyrl_tx.contract.requests import SampledLogprobs
from skyrl_tx.store.checkpoints import KEEP_LAST

Int = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""A 64-bit integer, which the codec, NumPy and the database can store. JSON has no limit."""
SeqId = Annotated[int, Field(ge=0, lt=2**63)]
"""A sequence number of a client. Copies of a sampling client start at multiples of a billion."""
SHARE_PREFIXES = "skyrl_tx.share_prefixes"
"""The key of metadata that says whether passes of a run share prefixes, see `ModelSpec`."""
SAMPLED_LOGPROBS = "skyrl_tx.sampled_logprobs"
"""The key of metadata with the `SampledLogprobs` of a session."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\b")
_MAX_METADATA_CHARS = 2**16
_MAX_NAMES = 64
_MAX_DIGITS = 9

ValueT = TypeVar("ValueT")
List = Annotated[list[ValueT], Field(fail_fast=True)]
"""A list in a request. Validation stops at the first wrong value.

Otherwise, a long list of wrong values would take a kilobyte of memory per value for its errors.
"""


class WireModel(BaseModel):
    """An object in a request.

    SDK releases add fields and send their defaults, so unknown fields are kept in `model_extra` and
    are not an error. But if `changes_maths` is true, `validation.UnknownFields` refuses an unknown
    field that is set. NaN and infinity are refused, although Python's JSON parser accepts them.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)
    changes_maths: ClassVar[bool] = False


class Response(BaseModel):
    """An object in a response."""

    model_config = ConfigDict(protected_namespaces=())


BODIES: dict[str, type[WireModel]] = {}
"""The requests in the OpenAPI document, by name."""


def describe_body(kind: type[WireModel], *, is_also_protobuf: bool = False) -> dict[str, Any]:
    """Return the options of a route whose endpoint parses its body itself.

    They describe the body in the OpenAPI document, because FastAPI does not know its schema. The
    response omits fields that are None.
    """
    BODIES[kind.__name__] = kind
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    if is_also_protobuf:
        content["application/x-protobuf"] = {"schema": {"type": "string", "format": "binary"}}
    body = {"required": True, "content": content}
    return {"openapi_extra": {"requestBody": body}, "response_model_exclude_none": True}


def make_body_schemas() -> dict[str, Any]:
    """Return the JSON schemas of the described bodies, and of the objects in them, by name."""
    kinds: list[tuple[type[BaseModel], Literal["validation"]]] = [(kind, "validation") for kind in BODIES.values()]
    return models_json_schema(kinds, ref_template="#/components/schemas/{model}")[1]["$defs"]


Table = Annotated[dict[str, ValueT], Field(max_length=_MAX_NAMES)]
"""An object with at most 64 keys, which the client chooses."""


def _convert_values_to_text(value: object) -> object:
    """Convert metadata values that are not strings to JSON: clients read strings."""
    if not isinstance(value, dict):
        return value
    metadata = cast(dict[str, object], value)
    return {
        name: part if isinstance(part, str) else msgspec.json.encode(part).decode() for name, part in metadata.items()
    }


def _check_length(metadata: dict[str, str]) -> dict[str, str]:
    """Raise ValueError for long metadata, because every list and search reads it."""
    if sum(len(name) + len(text) for name, text in metadata.items()) > _MAX_METADATA_CHARS:
        raise ValueError(f"must have at most {_MAX_METADATA_CHARS} characters in all")
    return metadata


def _check_known_keys(metadata: dict[str, str]) -> dict[str, str]:
    """Raise ValueError for a wrong value of a key that the server reads."""
    num_kept = metadata.get(KEEP_LAST, "all")
    if num_kept != "all" and not (num_kept.isdecimal() and 1 <= len(num_kept) <= _MAX_DIGITS and int(num_kept) > 0):
        raise ValueError(f"{KEEP_LAST} must be a number from 1, or 'all'")
    if metadata.get(SHARE_PREFIXES, "true") not in ("true", "false"):
        raise ValueError(f"{SHARE_PREFIXES} must be 'true' or 'false'")
    if metadata.get(SAMPLED_LOGPROBS, "raw") not in get_args(SampledLogprobs):
        raise ValueError(f"{SAMPLED_LOGPROBS} must be 'tempered' or 'raw'")
    return metadata


TextMetadata = Annotated[dict[str, str], AfterValidator(_check_length)]
Metadata = Annotated[TextMetadata, BeforeValidator(_convert_values_to_text), AfterValidator(_check_known_keys)]
"""Metadata of sessions and runs. Values that are not strings are converted to JSON."""
Name = Annotated[str, Field(max_length=200)]
"""A name that is stored with a session."""


class ModelRequestIds(WireModel):
    """The model and the sequence number of a request. `type` is a constant of the SDK.

    Ids are parsed first: without them, there is no future that could report an error.
    """

    model_id: str
    seq_id: SeqId | None = None
    type: str | None = None


class CreationIds(WireModel):
    """The session and the number of a model to create, and its metadata."""

    session_id: str
    model_seq_id: SeqId
    user_metadata: Metadata | None = None


class SampleRequestIds(WireModel):
    """The sampling session and the sequence number of a prompt.

    Without a sampling session, the request names its weights (`base_model`, `model_path`).
    """

    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: SeqId | None = None
    num_samples: Int = 1


def parse_version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, for example (0, 38) for "0.38.1"."""
    version = _VERSION.match(text)
    return None if version is None else (int(version[1]), int(version[2]))


def to_utc_time(seconds: float) -> datetime:
    """Convert seconds since the epoch to a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
