"""Identifiers, and the functions that format and parse them.

No other module builds or splits ids.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Self

from skyrl_tx.contract.errors import UserError

RequestId = NewType("RequestId", str)
"""Identifies a request and its future. Derived from the idempotency key of the request."""
SessionId = NewType("SessionId", str)
ModelId = NewType("ModelId", str)
"""Identifies a training run, as `{session_id}:train:{model_seq_id}`.

The SDK builds the same text.
"""
SamplingSessionId = NewType("SamplingSessionId", str)
"""Identifies a client's sampling session, as `{session_id}:sample:{sampling_session_seq_id}`."""
ArtifactId = NewType("ArtifactId", str)
"""Identifies an immutable directory of weight files."""
SamplerId = NewType("SamplerId", str)
"""Identifies frozen weights to sample from.

It equals the id of the artifact that holds the weights.
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SCHEME = "tinker://"


def model_id(session_id: SessionId, model_seq_id: int) -> ModelId:
    """Return the id of a training run, as SDK 0.38 builds it in `TrainingClient.load_weights`."""
    return ModelId(f"{session_id}:train:{model_seq_id}")


def sampling_session_id(session_id: SessionId, sampling_session_seq_id: int) -> SamplingSessionId:
    """Return the id of a sampling session."""
    return SamplingSessionId(f"{session_id}:sample:{sampling_session_seq_id}")


def custom_loss_id(session_id: SessionId, custom_loss_seq_id: int) -> str:
    """Return the id of a custom loss."""
    return f"{session_id}:loss:{custom_loss_seq_id}"


class CheckpointKind(StrEnum):
    """The kind of a checkpoint: the middle part of its `tinker://` path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The path of saved weights: `tinker://{model_id}/{kind}/{name}`."""

    model_id: ModelId
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind.value}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The path within its training run, `{kind}/{name}`.

        The SDK calls it `Checkpoint.checkpoint_id`.
        """
        return f"{self.kind.value}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a path. Raises UserError that quotes the path."""
        parts = text.removeprefix(_SCHEME).split("/")
        if not text.startswith(_SCHEME) or len(parts) != 3 or not parts[0]:
            raise UserError(f"path {text[:200]!r} is not of the form tinker://<run>/<kind>/<name>")
        return cls.of_parts(*parts)

    @classmethod
    def of_parts(cls, model_id: str, kind: str, name: str) -> Self:
        """Build a path from the parts of a URL.

        Raises UserError for an unknown kind or an invalid name.
        """
        if kind not in list(CheckpointKind):
            text = f"{_SCHEME}{model_id}/{kind}/{name}"
            raise UserError(f"path {text[:200]!r}: kind {kind[:80]!r} is not one of {', '.join(CheckpointKind)}")
        return cls(ModelId(model_id), CheckpointKind(kind), checkpoint_name(name))


def checkpoint_name(name: str) -> str:
    """Return the name if it is a valid checkpoint name. Raises UserError if it is not."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name {name[:80]!r} must be 1 to 128 letters, digits, '.', '_' or '-', "
            "and start with a letter or digit"
        )
    return name
