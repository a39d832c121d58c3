"""Schemas for uploads of external weights. *Unverified*.

They follow the reference pages of SDK 0.39 and 0.40. Neither release could be tested yet.
"""

import re
from datetime import datetime

from skyrl_tx.server.schemas.base import Name, Response, WireModel
from skyrl_tx.server.schemas.training import LoraConfig

_VERSION = re.compile(r"(\d+)\.(\d+)")
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
