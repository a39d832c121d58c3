"""The playground: its page, and the calls that stream a reply, render a prompt and score a reply under another model.

The visitor is known by the cookie, never by an API key. The form token comes in the header `X-Form-Token`.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field
from sqlmodel import Session
from starlette.responses import Response
from starlette.routing import Route

from skyrl_tx.apps.chat import logprobs, prompts, schemas
from skyrl_tx.apps.chat.generation import Generation, merge_deltas
from skyrl_tx.apps.chat.logprobs import TokenLogprob
from skyrl_tx.apps.chat.models import Weights, find_weights, list_checkpoints, resolve_weights
from skyrl_tx.apps.chat.reply import EventStream, encode_event, get_service, make_json_response, respond
from skyrl_tx.apps.chat.service import ChatRequest, ChatService, ContextTooLong
from skyrl_tx.apps.chat.text import Detokenizer, ModelText
from skyrl_tx.apps.console.login import NO_STORE, ConsoleSessions, Visitor, check_form
from skyrl_tx.apps.console.rendering import shorten_id
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.contract.errors import RequestError, UserError
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.server.context import ApiCall, ApiContext, get_base_url, receive_call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import BodyLimits
from skyrl_tx.server.schemas.base import Int, List, WireModel
from skyrl_tx.server.submission.validation import quote_value, refuse_extra, require
from skyrl_tx.store import sessions
from skyrl_tx.store.tables import CheckpointRow

_log = logging.getLogger(__name__)
pages = PageTable()
_MAX_OFFERED = 200
"""Checkpoints in the menu; the others are named by path."""
_DEFAULT_MAX_TOKENS = 512
_MAX_SAMPLES = 8
_MAX_MESSAGES = 1000
_TOP = 5
_LIMITS = BodyLimits(max_bytes=2**21, max_parts=2**18)
Handler = Callable[[Request, ApiCall], Awaitable[Response]]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[List[TokenId], Field(min_length=1)]


class PlaygroundMessage(WireModel):
    """One message of a conversation."""

    changes_maths = True
    role: Literal["system", "user", "assistant"]
    content: str


class PlaygroundPrompt(WireModel):
    """One of `messages`, `prompt` and `prompt_tokens`. If the last message is the assistant's, it is continued.

    `thinking` is the template's variable `enable_thinking`; without it the template decides.
    """

    changes_maths = True
    model: str
    messages: Annotated[List[PlaygroundMessage], Field(min_length=1, max_length=_MAX_MESSAGES)] | None = None
    prompt: str | None = None
    prompt_tokens: Tokens | None = None
    thinking: bool | None = None


class PlaygroundChat(PlaygroundPrompt):
    """A prompt, and how to continue it."""

    max_tokens: Int
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    seed: Int | None = None


class PlaygroundScore(WireModel):
    """A reply to score under a model, after the prompt that it answers."""

    changes_maths = True
    model: str
    prompt_tokens: Tokens
    reply_tokens: Tokens


@pages.get("/playground", menu="Playground")
def show_playground(visit: Visit) -> Page:
    """Show the playground, with the checkpoint or the run that the address names."""
    named = visit.get_query("checkpoint") or visit.get_query("run")
    settings = visit.context.settings

    def work(tx: Session) -> tuple[list[CheckpointRow], Weights | None]:
        found = resolve_weights(tx, visit.caller, settings, named) if named else None
        return list_checkpoints(tx, visit.caller)[:_MAX_OFFERED], found

    rows, weights = visit.read(work)
    chat = get_service(visit.request)
    limit = chat.limits.max_context_length
    setup = {
        "models": settings.model_names,
        "checkpoints": [_describe_checkpoint(row) for row in rows],
        "named": None if weights is None else str(weights.path or weights.base_model),
        "base_url": get_base_url(settings, visit.request),
        "form_token": visit.visitor.form_token,
        "may_sample": visit.visitor.may_change,
        "is_keyless": visit.visitor.is_keyless,
        "max_samples": _MAX_SAMPLES,
        "max_tokens": _DEFAULT_MAX_TOKENS if limit is None else min(_DEFAULT_MAX_TOKENS, max(limit // 2, 1)),
        **_find_abilities(chat),
    }
    return Page("playground.jinja", {"setup": setup})


def _describe_checkpoint(row: CheckpointRow) -> Mapping[str, object]:
    step = "" if row.step is None else f", step {row.step}"
    return {"path": str(row.path), "name": f"{shorten_id(row.model_id)} / {row.name}{step}"}


def _find_abilities(chat: ChatService) -> Mapping[str, bool]:
    """Return whether the model has a tokenizer, a chat template, and thinking that can be turned off."""
    try:
        template = chat.text.template.source
    except UserError:
        template = ""
    has_tokenizer = chat.text.has_tokenizer
    return {
        "has_tokenizer": has_tokenizer,
        "has_template": bool(template) and has_tokenizer,
        "has_thinking": "enable_thinking" in template,
    }


def create_routes(context: ApiContext) -> list[Route]:
    """Return the routes."""
    visitors = ConsoleSessions(context.authenticator, context.store, context.signing_key)

    def route(path: str, handler: Handler) -> Route:
        async def serve(request: Request) -> Response:
            visitor = await run_in_threadpool(_admit, visitors, request)
            async with receive_call(request, visitor.principal, _LIMITS) as call:
                response = await handler(request, call)
            response.headers.update(NO_STORE)
            return response

        return Route(path, serve, methods=["POST"])

    return [route("/console/chat", _chat), route("/console/render", _render), route("/console/score", _score)]


def _admit(visitors: ConsoleSessions, request: Request) -> Visitor:
    """Return the visitor. Raises ApiError 401 without a console session, 403 for another site or a key that reads."""
    visitor = visitors.find_visitor(request)
    if visitor is None:
        raise ApiError(HTTPStatus.UNAUTHORIZED, "your console session has ended: log in again")
    check_form(request, request.headers.get("x-form-token", ""), visitor.form_token)
    if not visitor.may_change:
        raise ApiError(HTTPStatus.FORBIDDEN, f"a key of scope {visitor.principal.scope} only reads: it may not sample")
    return visitor


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as the model sees it. `stop` are the tokens that end a reply in addition to the model's own."""

    text: str
    tokens: Sequence[int]
    stop: tuple[int, ...] = ()

    def describe(self, service: ChatService, weights: Weights) -> dict[str, object]:
        """Return the prompt with the text of each token, and whose prompt it is."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "texts": TokenTexts(service.text).read(self.tokens),
            "stop": self.stop,
            "model_path": None if weights.path is None else str(weights.path),
        }


async def _render(request: Request, call: ApiCall) -> Response:
    """Return the prompt that a conversation becomes."""
    service = get_service(request)

    def work() -> Response:
        wanted = call.body.parse_model(PlaygroundPrompt)
        weights = find_weights(call, wanted.model)
        return make_json_response(_read_prompt(service, call, wanted).describe(service, weights))

    return await run_in_threadpool(work)


async def _chat(request: Request, call: ApiCall) -> Response:
    """Continue a prompt; send the prompt, then the tokens as they come."""
    service = get_service(request)

    def prepare() -> tuple[dict[str, object], ChatRequest]:
        wanted = call.body.parse_model(PlaygroundChat)
        num_samples = schemas.check_num_samples(wanted.n)
        require(num_samples <= _MAX_SAMPLES, f"n {num_samples}: must be between 1 and {_MAX_SAMPLES} in the playground")
        weights = find_weights(call, wanted.model)
        prompt = _read_prompt(service, call, wanted)

        # A page asks for the usual number of tokens, also after a long prompt.
        params = schemas.make_params(
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
        )
        max_tokens = _limit_tokens(service, len(prompt.tokens), wanted.max_tokens)
        return prompt.describe(service, weights) | {"max_tokens": max_tokens}, ChatRequest(
            weights=weights,
            prompt=prompt.tokens,
            params=replace(params, max_tokens=max_tokens, stop_token_ids=prompt.stop),
            options=PromptOptions(sample_topk=min(_TOP, service.limits.max_topk)),
            num_samples=num_samples,
            is_streamed=True,
            needs_text=False,
            is_private=True,
            kind=sessions.PLAYGROUND,
        )

    described, start = await run_in_threadpool(prepare)
    generation = await service.start(call.caller, start)
    events = _stream_events(service, described, generation, start.num_samples)
    return EventStream(events, partial(_make_error_event, call.caller.owner), [generation])


def _limit_tokens(service: ChatService, num_prompt: int, max_tokens: int) -> int:
    """Return how many new tokens fit after a prompt, at most those asked for. Raises ContextTooLong if none does."""
    limit = service.limits.max_context_length
    if limit is None:
        return max_tokens
    if num_prompt >= limit:
        raise ContextTooLong(num_prompt, None, limit)
    return min(max_tokens, limit - num_prompt)


async def _stream_events(
    service: ChatService, prompt: dict[str, object], generation: Generation, num_samples: int
) -> AsyncGenerator[bytes]:
    """Yield the events of a reply."""
    yield encode_event({"type": "prompt", **prompt})
    texts = [TokenTexts(service.text) for _ in range(num_samples)]
    counts = [0] * num_samples
    async for _, delta in merge_deltas([generation]):
        index = delta.index
        counts[index] += len(delta.token_ids)
        tokens = texts[index].describe(logprobs.score_delta(delta, _TOP))
        yield encode_event({"type": "delta", "index": index, "text": delta.text, "tokens": tokens})
        if delta.finish is not None:
            yield encode_event(
                {"type": "finish", "index": index, "reason": delta.finish.reason, "count": counts[index]}
            )


def _make_error_event(owner: str, error: Exception) -> bytes:
    """Return the last event of a reply that fails. Unexpected errors are logged."""
    match error:
        case ApiError():
            detail = error.detail
        case RequestError():
            detail = error.message
        case _:
            _log.error("a reply of the playground failed while streaming", exc_info=error, extra={"owner": owner})
            detail = "internal error; the server's log has it"
    return encode_event({"type": "error", "detail": detail})


async def _score(request: Request, call: ApiCall) -> Response:
    """Return the log-probabilities of a reply under a model, with the likeliest tokens of each position."""
    service = get_service(request)

    def prepare() -> tuple[PlaygroundScore, ChatRequest]:
        wanted = call.body.parse_model(PlaygroundScore)
        call.check_unknown(wanted)
        weights = find_weights(call, wanted.model)
        options = PromptOptions(logprobs=True, last_n=len(wanted.reply_tokens), topk=min(_TOP, service.limits.max_topk))
        return wanted, ChatRequest(
            weights=weights,
            prompt=[*wanted.prompt_tokens, *wanted.reply_tokens],
            params=SamplingParams(seed=0, max_tokens=1),
            options=options,
            needs_text=False,
            kind=sessions.PLAYGROUND,
        )

    wanted, start = await run_in_threadpool(prepare)
    generation = await service.start(call.caller, start)

    async def work() -> Response:
        async for _ in merge_deltas([generation]):
            pass
        return await run_in_threadpool(describe_scores)

    def describe_scores() -> Response:
        tokens = logprobs.score_prompt(start.prompt, generation.prompt_result, _TOP)[len(wanted.prompt_tokens) :]
        return make_json_response({"tokens": TokenTexts(service.text).describe(tokens)})

    return await respond(request, work(), [generation])


def _read_prompt(service: ChatService, call: ApiCall, wanted: PlaygroundPrompt) -> _Prompt:
    """Return the prompt of a request. Raises UserError for a request that has none or several, or that is not text."""
    call.check_unknown(wanted)
    given = [name for name in ("messages", "prompt", "prompt_tokens") if getattr(wanted, name) is not None]
    require(len(given) == 1, f"messages, prompt, prompt_tokens: exactly one is needed, not {quote_value(given)}")
    require(wanted.thinking is None or wanted.messages is not None, "thinking: needs messages")

    text = service.text
    if wanted.prompt_tokens is not None:
        decoded = text.decode(wanted.prompt_tokens, skip_special=False) if text.has_tokenizer else ""
        return _Prompt(decoded, wanted.prompt_tokens)
    if wanted.prompt is not None:
        tokens = text.encode(wanted.prompt, add_special=True)
        require(bool(tokens), "prompt: has no tokens")
        return _Prompt(wanted.prompt, tokens)

    messages = wanted.messages or []
    for index, message in enumerate(messages):
        refuse_extra(message, f"messages[{index}].")
    continues = messages[-1].role == "assistant"
    rendered = prompts.render_prompt(
        text,
        call.settings,
        [{"role": message.role, "content": message.content} for message in messages],
        [],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables=None if wanted.thinking is None else {"enable_thinking": wanted.thinking},
    )
    stop = () if text.eos_token_id is None else (text.eos_token_id,)
    return _Prompt(rendered.text, rendered.tokens, stop)


class TokenTexts:
    """Describes the tokens of one growing text. Without a tokenizer all texts are empty."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._detokenizer = Detokenizer(text, skip_special=False) if text.has_tokenizer else None

    def read(self, tokens: Iterable[int]) -> list[str]:
        """Return the texts of the next tokens. The last token of a character has its text, those before it none."""
        detokenizer = self._detokenizer
        return ["" if detokenizer is None else detokenizer.feed([token]) for token in tokens]

    def describe(self, scored: Sequence[TokenLogprob]) -> list[dict[str, object]]:
        """Return the next tokens with log-probabilities and likeliest tokens."""
        return [
            self._describe(score, text)
            for score, text in zip(scored, self.read(score.token for score in scored), strict=True)
        ]

    def _describe(self, scored: TokenLogprob, text: str) -> dict[str, object]:
        made: dict[str, object] = {"id": scored.token, "text": text, "logprob": scored.logprob}
        if not text:
            made["bytes"] = self._write_bytes(scored.token)
        return made | {"top": [(token, self._decode_alone(token), logprob) for token, logprob in scored.top]}

    def _decode_alone(self, token: int) -> str:
        """Return the text of a token without its neighbours; the bytes of a part of a character in hexadecimal."""
        if self._detokenizer is None:
            return ""
        content = self._text.decode_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return f"<{content.hex(' ')}>"

    def _write_bytes(self, token: int) -> str:
        return "" if self._detokenizer is None else self._text.decode_bytes(token).hex(" ")
