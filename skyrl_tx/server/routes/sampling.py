"""Endpoints for sampling sessions and sample requests."""

from typing import cast

from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.contract.ids import CheckpointPath, SamplingSessionId, SessionId
from skyrl_tx.contract.ids import sampling_session_id as sampling_session_id_of
from skyrl_tx.contract.numbers import MAX_SAMPLES
from skyrl_tx.contract.requests import Rejected, SampledLogprobs
from skyrl_tx.server.context import ApiCall, Incoming, IncomingData
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.http.body import JsonRequest
from skyrl_tx.server.identity import access, direct_sessions
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.schemas.base import SAMPLED_LOGPROBS, SampleRequestIds, describe_body
from skyrl_tx.server.schemas.training import FutureHandle
from skyrl_tx.server.submission import sampling, submission, weights
from skyrl_tx.server.submission.submission import Submission
from skyrl_tx.server.submission.validation import quote_value
from skyrl_tx.store import engine_state, futures, sampling_sessions, sessions
from skyrl_tx.store.tables import SamplingSessionRow

router = APIRouter()

_LARGE_BYTES = 2**20
"""The prompts of larger bodies are compared with the context before they are validated."""


@router.post("/create_sampling_session", openapi_extra=describe_body(schemas.CreateSamplingSessionRequest))
def create_sampling_session(call: Incoming) -> dict[str, str]:
    """Create a sampling session on the base model or on saved weights."""
    request = call.body.parse_model(schemas.CreateSamplingSessionRequest)
    base_model, path = _read_weights(call, request.base_model, request.model_path)
    session_id = SessionId(request.session_id)
    name = sampling_session_id_of(session_id, request.sampling_session_seq_id)
    path_text = None if path is None else str(path)

    def work(tx: Session) -> None:
        access.find_open_session(tx, call.caller, session_id)
        existing = sampling_sessions.get(tx, name)
        if existing is None:
            is_taken = sampling_sessions.is_being_saved(tx, session_id, name)
        else:
            weights_in_use = existing.base_model, existing.model_path
            is_taken = existing.model_id is not None or weights_in_use != (base_model, path_text)
        if is_taken:
            raise bad_request(f"sampling_session_seq_id {request.sampling_session_seq_id}: is in use for other weights")
        if existing is None:
            sampler = direct_sessions.find_sampler_id(tx, call.caller, path)
            direct_sessions.insert_sampling_session(tx, call.caller, session_id, name, base_model, path_text, sampler)

    call.add_stored(len(call.body.raw))
    call.store.write(work)
    return {"type": "create_sampling_session", "sampling_session_id": name}


@router.post("/join_sampling_session", openapi_extra=describe_body(schemas.JoinSamplingSessionRequest))
def join_sampling_session(call: Incoming) -> schemas.JoinSamplingSessionResponse:
    """Return a number for a copy of a sampling client.

    The copy uses this number to make its sequence numbers unique.
    """
    name = SamplingSessionId(call.body.parse_model(schemas.JoinSamplingSessionRequest).sampling_session_id)

    def work(tx: Session) -> int:
        access.find_sampling_session(tx, call.caller, name)
        return sampling_sessions.add_clone(tx, name)

    return schemas.JoinSamplingSessionResponse(client_counter=call.store.write(work))


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
def get_sampler(sampler_id: str, call: Incoming) -> schemas.SamplerResponse:
    """Describe a sampling session: its base model and checkpoint."""
    row, _ = call.store.read(lambda tx: access.find_sampling_session(tx, call.caller, SamplingSessionId(sampler_id)))
    return schemas.SamplerResponse(sampler_id=sampler_id, base_model=row.base_model, model_path=row.model_path)


@router.post("/asample", response_model_exclude_none=True, openapi_extra=describe_body(schemas.AsampleRequest))
def asample(call: IncomingData) -> FutureHandle:
    """Queue a sample request. The response contains the ids of the sequences to be sampled."""
    call.add_stored(len(call.body.raw))
    with call.context.admission.reserve(call.caller.owner, len(call.body.raw)):
        return _queue_sample(call)


def _queue_sample(call: ApiCall) -> FutureHandle:
    request = call.body.parse_request()
    ids = request.parse_ids(SampleRequestIds)
    if ids.sampling_session_id is None:
        # Multiple clients share this session, and each of them numbers its own requests.
        session_id, seq_id = _find_direct_session(call, ids), None
    else:
        session_id, seq_id = SamplingSessionId(ids.sampling_session_id), ids.seq_id
    key = submission.make_sampling_key(session_id, seq_id, call.idempotency_key)
    sequence_ids = _make_sequence_ids(key, ids.num_samples)

    # Translate the request for the session's current weights, and store it unless they changed.
    def queue() -> tuple[str, Submission, futures.SubmittedRequest | None]:
        row, owner = call.store.read(lambda tx: access.find_sampling_session(tx, call.caller, session_id))

        def translate(schema: schemas.AsampleRequest) -> Submission:
            logprobs = _find_logprobs(call, row.session_id, schema.sampling_params.temperature)
            sample = sampling.translate_sample(
                schema, row.sampler_id, sequence_ids, call.body.max_dense_bytes, logprobs
            )
            return (
                sample.replace_request(_reject_dropped_sampler(row))
                if row.sampler_id is None and row.model_id
                else sample
            )

        if (problem := _find_long_prompt(call, request)) is not None:
            sample = Submission.from_error("sample", problem)
        else:
            sample = submission.from_json("sample", schemas.AsampleRequest, request, translate, call.check_unknown)
        engine = call.context.admission.choose_engine(session_id)
        submitted = call.store.write(
            lambda tx: submission.submit_to_sampler(tx, row, owner, seq_id, key, sample, engine=engine)
        )
        return owner, sample, submitted

    owner, sample, submitted = queue()
    while submitted is None:  # an in-flight save has replaced the weights, and the old files may be gone
        owner, sample, submitted = queue()
    call.context.admission.record(owner, submitted, len(sample.body))
    return FutureHandle(request_id=submitted.request_id, sample_sequence_ids=sequence_ids)


def _find_logprobs(call: ApiCall, session_id: SessionId, temperature: float) -> SampledLogprobs:
    """Return the kind of log-probabilities that a session or else the server chose for its samples.

    At the temperatures 0 and 1 all kinds are equal, so the metadata of the session is not read.
    """
    if temperature in (0, 1):
        return "tempered"
    metadata = call.store.read(lambda tx: sessions.get_metadata(tx, [session_id])).get(session_id, {})
    return cast(SampledLogprobs, metadata.get(SAMPLED_LOGPROBS, call.settings.sampled_logprobs))


def _read_weights(call: ApiCall, base_model: str | None, model_path: str | None) -> tuple[str, CheckpointPath | None]:
    """Return the base model and the checkpoint that a request names.

    Raises UserError if the request names a base model that this server does not serve, or ApiError
    400 if the request names neither a base model nor a checkpoint.
    """
    if model_path is None and base_model is None:
        raise bad_request("base_model: missing, and model_path too; one of them must name the weights to sample from")
    name = call.settings.resolve_model_name(base_model or call.settings.public_model_name)
    return name, None if model_path is None else weights.parse_sampler_path(model_path)


def _find_direct_session(call: ApiCall, ids: SampleRequestIds) -> SamplingSessionId:
    """Find or create the sampling session for a prompt that names its weights.

    All such prompts of an owner for the same weights share one sampling session.
    """
    base_model, path = _read_weights(call, ids.base_model, ids.model_path)
    row = direct_sessions.find_or_create_sampling_session(call.store, call.caller, sessions.DIRECT, base_model, path)
    return row.sampling_session_id


def _find_long_prompt(call: ApiCall, request: JsonRequest) -> str | None:
    """Return an error for a prompt that is longer than the context, or None.

    The engine would refuse it, too, but only after both processes have converted and stored it.
    """
    if len(call.body.raw) <= _LARGE_BYTES:
        return None
    state = call.store.read(engine_state.get)
    limit = None if state is None else cast(int | None, state.capabilities.get("max_context_length"))
    length = sum(map(len, _list_token_lists(request.value.get("prompt"))))
    if limit is None or length <= limit:
        return None
    return f"prompt has {length} tokens, which exceeds the context of {limit} tokens; shorten the prompt"


def _list_token_lists(prompt: object) -> list[list[object]]:
    """Return the token lists in the chunks of a prompt that has not been validated yet."""
    chunks = cast(dict[str, object], prompt).get("chunks") if isinstance(prompt, dict) else None
    found = (
        cast(dict[str, object], chunk).get("tokens")
        for chunk in cast(list[object], chunks if isinstance(chunks, list) else [])
        if isinstance(chunk, dict)
    )
    return [cast(list[object], tokens) for tokens in found if isinstance(tokens, list)]


def _reject_dropped_sampler(row: SamplingSessionRow) -> Rejected:
    """Return a rejected request, because the ephemeral sampler of the session was dropped.

    The caller keeps the digest of the original request, so that a retry is recognized.
    """
    message = (
        f"sampling_session_id {quote_value(row.sampling_session_id)}: its ephemeral sampler was not used for a long "
        "time and was dropped; save weights to sample from with a name to keep them"
    )
    return Rejected(kind="sample", message=message)


def _make_sequence_ids(key: str, num_samples: int) -> list[str]:
    """Return the ids of the sequences to sample. A retry gets the same ids.

    Returns [] for an invalid number of samples, because such a request will be rejected.
    """
    stem = futures.make_request_id(key).replace("req-", "seq-", 1)
    count = num_samples if num_samples <= MAX_SAMPLES else 0
    return [f"{stem}-{index}" for index in range(count)]
