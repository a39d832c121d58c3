"""Schemas for uploads of external weights and for searching checkpoints. *Unverified*.

They follow the reference pages of SDK 0.39 and 0.40. Neither release could be tested yet.
"""

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from skyrl_tx.server.schemas.base import List, Name, Response, Table, WireModel
from skyrl_tx.server.schemas.service import SearchOwner
from skyrl_tx.server.schemas.training import LoraConfig
from skyrl_tx.server.schemas.weights import Checkpoint

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\b")
_FIRST_WITH_HEADERS = 0, 40


class ExternalWeightsUploadStartRequest(WireModel):
    """Starts an upload of an adapter for a base model."""

    base_model: str
    lora_config: LoraConfig
    destination_project_id: Name | None = None


class ExternalWeightsUploadURL(Response):
    """A signed URL, and the headers that the PUT must send."""

    url: str
    headers: dict[str, str]


class ExternalWeightsUploadStartResponse(Response):
    """The signed URL of each file, which is uploaded with PUT before `expires`.

    SDK 0.40 and later read an object per file, and SDK 0.39 reads the URL alone.
    """

    upload_id: str
    urls: dict[str, str] | dict[str, ExternalWeightsUploadURL]
    expires: datetime

    @classmethod
    def create(
        cls, upload_id: str, urls: dict[str, str], expires: datetime, sdk_version: str
    ) -> "ExternalWeightsUploadStartResponse":
        """Create the response for a version of the SDK."""
        version = _VERSION.match(sdk_version)
        if version is None or (int(version[1]), int(version[2])) < _FIRST_WITH_HEADERS:
            return cls(upload_id=upload_id, urls=urls, expires=expires)
        objects = {name: ExternalWeightsUploadURL(url=url, headers={}) for name, url in urls.items()}
        return cls(upload_id=upload_id, urls=objects, expires=expires)


class ExternalWeightsUploadFinishRequest(WireModel):
    """Turns the uploaded files into a checkpoint."""

    upload_id: str


class ExternalWeightsUploadFinishResponse(Response):
    """The path of the checkpoint."""

    tinker_path: str


class CheckpointSearchCursor(WireModel):
    """The last checkpoint of the previous page. On this server, its path is its `uuid`."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: str


class CheckpointSearchRequest(WireModel):
    """Search conditions, which must all hold. An empty list of base models matches nothing."""

    project_ids: Annotated[List[str], Field(max_length=1000)] | None = None
    user_metadata: Table[str] = Field(default_factory=dict[str, str])
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = Field(default_factory=SearchOwner)
    base_models: Annotated[List[str], Field(max_length=1000)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: CheckpointSearchCursor | None = None


class CheckpointSearchResponse(Response):
    """A page of checkpoints. The last page has no cursor."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
