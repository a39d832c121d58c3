"""Endpoints for sampling sessions and sample requests.

A sample request may name its weights instead of a sampling session. For such requests the server
creates a session and sampling sessions. All requests of an owner share one session per kind of
client, for example one for the OpenAI endpoints. Each request counts as a heartbeat of that session.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from fastapi import APIRouter
from sqlmodel import Session

from skyrl_tx.contract import requests
from skyrl_tx.contract.arrays import Int64Array
from skyrl_tx.contract.ids import CheckpointPath, SamplerId, SamplingSessionId, SessionId
from skyrl_tx.contract.ids import sampling_session_id as sampling_session_id_of
from skyrl_tx.contract.numbers import MAX_SAMPLES, check_number
from skyrl_tx.contract.requests import SampledLogprobs
from skyrl_tx.server.context import ApiCall, Incoming, IncomingData
from skyrl_tx.server.errors import bad_request
from skyrl_tx.server.http.body import JsonRequest
from skyrl_tx.server.identity import access
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.routes.training import tokens_from_json
from skyrl_tx.server.routes.weights import parse_sampler_path
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.schemas.base import SAMPLED_LOGPROBS, SampleRequestIds, describe_body
from skyrl_tx.server.schemas.training import FutureHandle
from skyrl_tx.server.submission import submission
from skyrl_tx.server.submission.submission import Submission
from skyrl_tx.server.submission.tensors import DenseBudget, cells_from_json, from_json
from skyrl_tx.server.submission.validation import choose_seed, quote_value, require
from skyrl_tx.store import audit, engine_state, futures, sampling_sessions, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import SamplingSessionRow

router = APIRouter()
_TARGETS = "target_prompt_logprobs"
_HEARTBEAT_EVERY_S = 20.0
_LARGE_BYTES = 2**20
"""The prompts of larger bodies are compared with the context before they are validated."""


@router.post("/create_sampling_session", **describe_body(schemas.CreateSamplingSessionRequest))
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
            _insert_sampling_session(tx, call.caller, session_id, name, base_model, path)

    call.add_stored(len(call.body.raw))
    call.store.write(work)
    return {"type": "create_sampling_session", "sampling_session_id": name}


@router.post("/join_sampling_session", **describe_body(schemas.JoinSamplingSessionRequest))
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


@router.post("/asample", **describe_body(schemas.AsampleRequest))
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
            sample = translate_sample(schema, row.sampler_id, sequence_ids, call.body.max_dense_bytes, logprobs)
            is_dropped = row.sampler_id is None and row.model_id is not None
            return sample.reject(_describe_dropped_sampler(row)) if is_dropped else sample

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
    return name, None if model_path is None else parse_sampler_path(model_path)


def _find_direct_session(call: ApiCall, ids: SampleRequestIds) -> SamplingSessionId:
    """Find or create the sampling session for a prompt that names its weights.

    All such prompts of an owner for the same weights share one sampling session.
    """
    base_model, path = _read_weights(call, ids.base_model, ids.model_path)
    row = find_or_create_sampling_session(call.store, call.caller, sessions.DIRECT, base_model, path)
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


def _describe_dropped_sampler(row: SamplingSessionRow) -> str:
    return (
        f"sampling_session_id {quote_value(row.sampling_session_id)}: its ephemeral sampler was not used for a long "
        "time and was dropped; save weights to sample from with a name to keep them"
    )


def _make_sequence_ids(key: str, num_samples: int) -> list[str]:
    """Return the ids of the sequences to sample. A retry gets the same ids.

    Returns [] for an invalid number of samples, because such a request will be rejected.
    """
    stem = futures.make_request_id(key).replace("req-", "seq-", 1)
    count = num_samples if num_samples <= MAX_SAMPLES else 0
    return [f"{stem}-{index}" for index in range(count)]


def translate_sample(
    request: schemas.AsampleRequest,
    sampler: SamplerId | None,
    sequence_ids: Sequence[str],
    max_dense_bytes: int,
    logprobs: SampledLogprobs = "tempered",
) -> Submission:
    """Translate a sample request. Draws the seed if the client sent none.

    `logprobs` says which log-probabilities the sample reports: "tempered" ones, of the distribution
    that tokens are drawn from, or "raw" ones, before temperature and penalties.
    """
    check_number("num_samples", request.num_samples)

    sample = requests.Sample(
        prompt=tokens_from_json(request.prompt, "prompt"),
        num_samples=request.num_samples,
        sampler=sampler,
        params=_read_params(request.sampling_params),
        options=_read_options(request, max_dense_bytes),
        sequence_ids=tuple(sequence_ids),
        is_recorded=bool(request.record_stability_info),
    )

    # A request with the same id is compared with this one as the client sent it: without the sampler, the ids and
    # the seed that the server adds.
    as_sent = replace(sample, sampler=None, sequence_ids=())
    sample = replace(sample, params=set_logprobs(sample.params, logprobs))
    if request.sampling_params.seed is None:
        as_sent = replace(as_sent, params=replace(as_sent.params, seed=0))
    return Submission.from_request(sample, as_sent=as_sent)


def set_logprobs(params: requests.SamplingParams, kind: SampledLogprobs) -> requests.SamplingParams:
    """Return `params` with the kind of log-probabilities to report."""
    return replace(params, raw_logprobs=True) if kind == "raw" else params


def _read_params(params: schemas.WireSamplingParams) -> requests.SamplingParams:
    where = "sampling_params"
    check_number(f"{where}.top_k", params.top_k)
    stop_strings, stop_token_ids = _split_stops(params.stop)
    return requests.SamplingParams(
        seed=choose_seed(params.seed, f"{where}.seed"),
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        eos_stops=params.stop is None or len(stop_strings) + len(stop_token_ids) > 0,
    )


def _split_stops(stop: str | list[int] | list[str] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split `stop` into strings and token ids.

    An empty list has neither. Then nothing stops a sample early, not even EOS.
    """
    given = [stop] if isinstance(stop, str) else stop or []
    strings = tuple(part for part in given if isinstance(part, str))
    token_ids = tuple(part for part in given if isinstance(part, int))
    check_stops(strings, token_ids, "sampling_params.stop", "sampling_params.stop")
    return strings, token_ids


def check_stops(strings: Sequence[str], token_ids: Sequence[int], where: str, where_tokens: str) -> None:
    """Raise UserError for too many or too long stop strings, or for invalid stop tokens."""
    for given, limit, what, field in (
        (len(strings), requests.MAX_STOP_STRINGS, "strings", where),
        (len(token_ids), requests.MAX_STOP_TOKENS, "tokens", where_tokens),
    ):
        require(given <= limit, f"{field} has {given} {what}: must have at most {limit}", field=field)
    for index, text in enumerate(strings):
        require(
            len(text) <= requests.MAX_STOP_CHARS,
            f"{where}[{index}] {quote_value(text)} has {len(text)} characters: "
            f"must have at most {requests.MAX_STOP_CHARS}",
            field=where,
        )
    for index, token in enumerate(token_ids):
        check_number(f"{where_tokens}[{index}]", token, field="stop_token")


def _read_options(request: schemas.AsampleRequest, max_dense_bytes: int) -> requests.PromptOptions:
    last_n, targets = request.prompt_logprobs_last_n, request.target_prompt_logprobs
    require(
        last_n is None or bool(request.prompt_logprobs),
        f"prompt_logprobs_last_n {quote_value(last_n)}: needs prompt_logprobs",
    )
    return requests.PromptOptions(
        logprobs=bool(request.prompt_logprobs),
        last_n=last_n,
        topk=request.topk_prompt_logprobs or 0,
        sample_topk=request.topk_sample_logprobs or 0,
        target_tokens=None if targets is None else _read_targets(targets, max_dense_bytes),
        target_cells=None if targets is None else cells_from_json(targets, _TARGETS),
        alt_tokens_k=request.prompt_alt_tokens_k or 0,
    )


def _read_targets(targets: schemas.TensorData, max_dense_bytes: int) -> Int64Array:
    """Read the targets as int64 [T-1, K]. Cells that a sparse tensor does not list are -1."""
    array = from_json(targets, DenseBudget(max_dense_bytes), _TARGETS, fill=-1)
    require(array.dtype.kind == "i" and array.ndim == 2, f"{_TARGETS}: must be a matrix of int64, not {array.dtype}")
    return array.astype(np.int64)


def find_or_create_sampling_session(
    store: Store, caller: Principal, kind: str, base_model: str, path: CheckpointPath | None
) -> SamplingSessionRow:
    """Find or create the caller's sampling session for a base model or checkpoint.

    `kind` is one of `sessions.SERVER_SESSIONS`. Raises ApiError 404 if the caller may not read the
    checkpoint at `path`.
    """
    path_text = None if path is None else str(path)

    def find(tx: Session) -> tuple[SessionId | None, SamplingSessionRow | None]:
        session_id = sessions.find_unfinished(tx, caller.owner, kind)
        sampler = _find_sampler_id(tx, caller, path)
        if session_id is None:
            return None, None
        return session_id, sampling_sessions.find(tx, session_id, path_text, sampler)

    # The usual case needs no write: the sampling session exists, and its heartbeat is recent.
    def find_recent(tx: Session) -> SamplingSessionRow | None:
        session_id, row = find(tx)
        session = None if session_id is None else sessions.find(tx, session_id)
        is_recent = session is not None and session.last_heartbeat_at > time.time() - _HEARTBEAT_EVERY_S
        return row if is_recent else None

    def create(tx: Session) -> SamplingSessionRow:
        now = time.time()
        session_id, row = find(tx)
        if session_id is None:
            session_id = sessions.create(tx, owner=caller.owner, display_name=kind, now=now)
        sessions.record_heartbeat(tx, session_id, now)  # no client sends heartbeats for this session
        if row is not None:
            return row
        name = _choose_free_name(tx, session_id)
        return _insert_sampling_session(tx, caller, session_id, name, base_model, path)

    return store.read(find_recent) or store.write(create)


def _choose_free_name(tx: Session, session_id: SessionId) -> SamplingSessionId:
    """Return a free name for a sampling session.

    The search starts at the number of existing sampling sessions. The name with this number may be
    in use, if older sampling sessions were removed.
    """
    number = len(sampling_sessions.list_ids_by_session(tx, session_id))
    while sampling_sessions.get(tx, name := sampling_session_id_of(session_id, number)) is not None:
        number += 1
    return name


def _find_sampler_id(tx: Session, caller: Principal, path: CheckpointPath | None) -> SamplerId | None:
    """Return the id of the weights at a path, or None for the base model.

    Raises ApiError 404 if the caller may read no checkpoint at this path.
    """
    if path is None:
        return None
    checkpoint, _ = access.find_readable_checkpoint(tx, caller, path)
    return SamplerId(checkpoint.artifact_id)


def _insert_sampling_session(
    tx: Session,
    caller: Principal,
    session_id: SessionId,
    name: SamplingSessionId,
    base_model: str,
    path: CheckpointPath | None,
) -> SamplingSessionRow:
    """Insert a sampling session, and record in the audit log that its checkpoint is read.

    Raises ApiError 404 if the caller may read no checkpoint at this path.
    """
    now = time.time()
    sampler = _find_sampler_id(tx, caller, path)
    if path is not None:
        audit.record(tx, "checkpoint_read", caller.actor, now, path=path, purpose="sample")
    row = SamplingSessionRow(
        sampling_session_id=name,
        session_id=session_id,
        base_model=base_model,
        model_path=None if path is None else str(path),
        sampler_id=sampler,
        created_at=now,
        last_used_at=now,
    )
    sampling_sessions.create_session(tx, row)
    return row
