"""Names of things, and the only parser and formatter of each."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Self

from skyrl_tx.contract.errors import UserError

RequestId = NewType("RequestId", str)
"""A future: derived from the ids that deduplicate its request."""
SessionId = NewType("SessionId", str)
ModelId = NewType("ModelId", str)
"""A training run: `{session_id}:train:{model_seq_id}`, a form the SDK builds by itself."""
SamplingSessionId = NewType("SamplingSessionId", str)
"""What a client samples from: `{session_id}:sample:{sampling_session_seq_id}`."""
ArtifactId = NewType("ArtifactId", str)
"""An immutable directory of weight files."""
SamplerId = NewType("SamplerId", str)
"""Frozen weights to sample from; the same text as the artifact that holds them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SCHEME = "tinker://"


def model_id(session_id: SessionId, model_seq_id: int) -> ModelId:
    """Name the model of a session (SDK 0.38, `TrainingClient` from `load_weights`, builds the same text)."""
    return ModelId(f"{session_id}:train:{model_seq_id}")


def sampling_session_id(session_id: SessionId, sampling_session_seq_id: int) -> SamplingSessionId:
    """Name a sampling session of a session."""
    return SamplingSessionId(f"{session_id}:sample:{sampling_session_seq_id}")


class CheckpointKind(StrEnum):
    """The middle part of a `tinker://` path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A saved set of weights: `tinker://{model_id}/{kind}/{name}`."""

    model_id: ModelId
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind.value}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The path within its run, as the SDK's `Checkpoint.checkpoint_id` has it: `{kind}/{name}`."""
        return f"{self.kind.value}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a path; raises UserError naming what is wrong with it."""
        parts = text.removeprefix(_SCHEME).split("/")
        if not text.startswith(_SCHEME) or len(parts) != 3 or not parts[0]:
            raise UserError(f"path {text[:200]!r} is not of the form tinker://<run>/<kind>/<name>")
        run, kind, name = parts
        if kind not in list(CheckpointKind):
            raise UserError(f"path {text[:200]!r}: kind {kind!r} is not one of {', '.join(CheckpointKind)}")
        return cls(ModelId(run), CheckpointKind(kind), checkpoint_name(name))


def checkpoint_name(name: str) -> str:
    """Return the name if it may name a checkpoint; raises UserError if it may not."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name {name[:80]!r} must be 1 to 128 letters, digits, '.', '_' or '-', not led by a sign"
        )
    return name
