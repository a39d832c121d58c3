"""A stored request as the engine holds it in memory."""

from dataclasses import dataclass, fields

from skyrl_tx.contract import codec, requests
from skyrl_tx.store.futures import PendingRequest, StoredRequest

BARRIER_KINDS = frozenset({"optim_step", "save_weights", "load_weights", "unload_model"})
DEFERRED_BYTES = 1024
"""Estimated memory of a request whose body has not been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest(StoredRequest):
    """One decoded request."""

    request: requests.Request | None
    """None for a pass whose body is still only in the database; a `Rejected` with the reason if it is damaged."""
    num_bytes: int = 0
    """Estimated memory of this request."""
    num_deferred_bytes: int = 0
    """Size of a body that has not been read, else 0."""

    @classmethod
    def from_row(cls, pending: PendingRequest) -> "QueuedRequest":
        """Decode a stored request. One that cannot be decoded becomes a `Rejected` with the reason."""
        request: requests.Request | None = None
        try:
            if pending.is_damaged:
                raise codec.CodecError("the stored request is damaged: its checksum is not that of what was written")
            if not pending.num_left_out:
                decoded = codec.decode(pending.body)
                assert not isinstance(decoded, requests.ModelSpec)
                request = decoded  # pyright: ignore[reportAssignmentType]
        except codec.CodecError as error:
            request = requests.Rejected(kind=pending.kind, message=str(error), backward=pending.kind == "model_pass")
        return cls(
            **{field.name: getattr(pending, field.name) for field in fields(StoredRequest)},
            request=request,
            num_bytes=len(pending.body) or DEFERRED_BYTES,
            num_deferred_bytes=pending.num_left_out,
        )

    @property
    def is_barrier(self) -> bool:
        """Whether the client sends this request only after all earlier ones were acknowledged."""
        return self.kind in BARRIER_KINDS

    @property
    def num_tokens(self) -> int:
        """Tokens of a pass; 0 for other kinds."""
        return sum(datum.tokens.size for datum in self.model_pass.data) if self.model_pass else 0

    @property
    def model_pass(self) -> requests.ModelPass | None:
        """The request if it is a pass, else None."""
        return self.request if isinstance(self.request, requests.ModelPass) else None
