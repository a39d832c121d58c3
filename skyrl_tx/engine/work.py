"""A stored request as the engine holds it."""

from dataclasses import dataclass

from skyrl_tx.contract import codec, requests
from skyrl_tx.contract.ids import ModelId, RequestId, SamplingSessionId, SessionId
from skyrl_tx.store.futures import PendingRequest

_PASS_KINDS = frozenset({"model_pass"})
BARRIER_KINDS = frozenset({"optim_step", "save_weights", "load_weights", "unload_model"})


UNREAD_BYTES = 1024
"""What a request takes in memory while its body is not read, about."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A request whose body is still in the database alone."""

    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request, decoded. `attempts` counts how often it was begun by engines that then ended."""

    position: int
    request_id: RequestId
    session_id: SessionId
    model_id: ModelId | None
    seq_id: int | None
    sampling_session_id: SamplingSessionId | None
    attempts: int
    request: requests.Request | Unread
    num_bytes: int = 0
    """What it takes in memory, about."""
    is_damaged: bool = False
    """Whether the disk gave back other bytes than were stored; `request` is then one that fails with that reason."""

    @property
    def kind(self) -> str:
        """The request's kind; for a rejected one, the kind it would have had."""
        request = self.request
        return request.kind if isinstance(request, requests.Rejected | Unread) else codec.kind_of(request)

    @property
    def num_unread_bytes(self) -> int:
        """How much of it is still to be read from the database."""
        return self.request.num_bytes if isinstance(self.request, Unread) else 0

    @property
    def is_suspect(self) -> bool:
        """Whether it was under way when an engine ended, so that it may be to blame for that."""
        return self.attempts > 0

    @property
    def is_pass(self) -> bool:
        """Whether it has a place among a model's passes, which may wait for one another."""
        return self.kind in _PASS_KINDS

    @property
    def is_barrier(self) -> bool:
        """Whether the client sends it only once all before it has been acknowledged."""
        return self.kind in BARRIER_KINDS

    @property
    def num_tokens(self) -> int:
        """Tokens of a pass; 0 for anything else."""
        return sum(datum.tokens.size for datum in self.model_pass.data) if self.model_pass else 0

    @property
    def model_pass(self) -> requests.ModelPass | None:
        """The request, if it is a pass that can be run."""
        return self.request if isinstance(self.request, requests.ModelPass) else None


def work_of(pending: PendingRequest) -> Work:
    """Decode a stored request; one that this release cannot read becomes one that fails with the reason."""
    request: requests.Request | Unread
    try:
        if pending.is_damaged:
            raise codec.CodecError("the stored request is damaged: its checksum is not that of what was written")
        if pending.num_left_out:
            request = Unread(pending.kind, pending.num_left_out)
        else:
            decoded = codec.decode(pending.body)
            assert not isinstance(decoded, requests.ModelSpec)
            request = decoded  # pyright: ignore[reportAssignmentType]
    except codec.CodecError as error:
        request = requests.Rejected(kind=pending.kind, message=str(error), backward=pending.kind == "model_pass")
    return Work(
        position=pending.position,
        request_id=pending.request_id,
        session_id=pending.session_id,
        model_id=pending.model_id,
        seq_id=pending.seq_id,
        sampling_session_id=pending.sampling_session_id,
        attempts=pending.attempts,
        request=request,
        num_bytes=len(pending.body) or UNREAD_BYTES,
        is_damaged=pending.is_damaged,
    )
