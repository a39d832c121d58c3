"""The playground: its page, and the endpoints that its script calls.

The endpoints stream a reply, render a prompt, and score a reply under another model. They
authenticate the visitor by the session cookie, not by an API key. The form token is in the header
`X-Form-Token`.
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

from skyrl_tx.apps.chat import logprobs, prompts, sampling_fields, schemas
from skyrl_tx.apps.chat.generation import Delta, Generation, merge_deltas, run_off_loop
from skyrl_tx.apps.chat.logprobs import TokenLogprob
from skyrl_tx.apps.chat.models import Weights, find_weights, list_sampler_checkpoints, resolve_weights
from skyrl_tx.apps.chat.reply import EventStream, encode_event, get_service, make_json_response, respond
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.apps.chat.text import Detokenizer, ModelText
from skyrl_tx.apps.console.login import PAGE_HEADERS, ConsoleSessions, Visitor, check_form
from skyrl_tx.apps.console.rendering import shorten_id
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.server.context import ApiCall, ApiContext, get_base_url, receive_call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import BodyLimits
from skyrl_tx.server.schemas.base import Int, List, WireModel
from skyrl_tx.server.submission.validation import quote_value, require
from skyrl_tx.store import sessions
from skyrl_tx.store.tables import CheckpointRow

_log = logging.getLogger(__name__)
pages = PageTable()
_MAX_CHECKPOINTS = 200
"""Limit on the checkpoints in the menu. Any other checkpoint can be entered by its path."""
_DEFAULT_MAX_TOKENS = 512
_MAX_SAMPLES = 8
_MAX_MESSAGES = 1000
_TOP = 5
"""How many of the most likely tokens are shown at each position."""
_LIMITS = BodyLimits(max_bytes=2**21, max_parts=2**18)
Handler = Callable[[Request, ApiCall], Awaitable[Response]]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[List[TokenId], Field(min_length=1)]


class PlaygroundMessage(WireModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class PlaygroundPrompt(WireModel):
    """A prompt, as exactly one of `messages`, `prompt` and `prompt_tokens`.

    If the last message is from the assistant, the model continues it. `thinking` sets the variable
    `enable_thinking` of the chat template. If it is absent, the template decides.
    """

    model: str
    messages: Annotated[List[PlaygroundMessage], Field(min_length=1, max_length=_MAX_MESSAGES)] | None = None
    prompt: str | None = None
    prompt_tokens: Tokens | None = None
    thinking: bool | None = None


class PlaygroundChat(PlaygroundPrompt):
    """A prompt with sampling parameters."""

    max_tokens: Int
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    seed: Int | None = None


class PlaygroundScore(WireModel):
    """A reply to score under a model, and the prompt before it."""

    model: str
    prompt_tokens: Tokens
    reply_tokens: Tokens


@pages.get("/playground", menu="Playground")
def show_playground(visit: Visit) -> Page:
    """Show the playground. The URL may name a checkpoint or a run to select."""
    # The checkpoints in the menu, and the weights that the URL names
    named = visit.get_query("checkpoint") or visit.get_query("run")
    settings = visit.context.settings

    def work(tx: Session) -> tuple[list[CheckpointRow], Weights | None]:
        selected = resolve_weights(tx, visit.caller, settings, named) if named else None
        return list_sampler_checkpoints(tx, visit.caller)[:_MAX_CHECKPOINTS], selected

    rows, weights = visit.read(work)

    # What the script needs to know
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
        **_find_features(chat),
    }
    return Page("playground.jinja", {"setup": setup})


def _describe_checkpoint(row: CheckpointRow) -> Mapping[str, object]:
    step = "" if row.step is None else f", step {row.step}"
    return {"path": str(row.path), "name": f"{shorten_id(row.model_id)} / {row.name}{step}"}


def _find_features(chat: ChatService) -> Mapping[str, bool]:
    """Return whether the model has a tokenizer, a chat template, and a switch for thinking."""
    try:
        template = chat.text.template.source
    except RequestError:
        template = ""
    has_tokenizer = chat.text.has_tokenizer
    return {
        "has_tokenizer": has_tokenizer,
        "has_template": bool(template) and has_tokenizer,
        "has_thinking": "enable_thinking" in template,
    }


def create_routes(context: ApiContext) -> list[Route]:
    """Create the routes of the endpoints."""
    visitors = ConsoleSessions(context.authenticator, context.store, context.signing_key)

    def route(path: str, handler: Handler) -> Route:
        async def serve(request: Request) -> Response:
            visitor = await run_in_threadpool(_admit, visitors, request)
            # The handlers wait for threads themselves, so none stays reserved while a reply is sampled
            async with receive_call(request, visitor.principal, _LIMITS) as call:
                pass
            response = await handler(request, call)
            response.headers.update(PAGE_HEADERS)
            return response

        return Route(path, serve, methods=["POST"])

    return [route("/console/chat", _chat), route("/console/render", _render), route("/console/score", _score)]


def _admit(visitors: ConsoleSessions, request: Request) -> Visitor:
    """Return the visitor.

    Raises ApiError 401 without a console session, and 403 for a request from another site or for a
    read-only key.
    """
    visitor = visitors.find_visitor(request)
    if visitor is None:
        raise ApiError(HTTPStatus.UNAUTHORIZED, "your console session has ended; log in again")
    check_form(request, request.headers.get("x-form-token", ""), visitor.form_token)
    if not visitor.may_change:
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"a key of scope {visitor.principal.scope} may not sample; log in with a key of scope user",
        )
    return visitor


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A rendered prompt.

    `stop` are tokens that end a reply, in addition to the model's EOS tokens.
    """

    text: str
    tokens: Sequence[int]
    stop: tuple[int, ...] = ()

    def describe(self, service: ChatService, weights: Weights) -> dict[str, object]:
        """Return the prompt for the script, with the text of each token and the weights' path."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "texts": TokenTexts(service.text).read(self.tokens),
            "stop": self.stop,
            "model_path": None if weights.path is None else str(weights.path),
        }


async def _render(request: Request, call: ApiCall) -> Response:
    """Render a conversation, and return the prompt."""
    service = get_service(request)

    def work() -> Response:
        body = schemas.parse_request(call, PlaygroundPrompt)
        weights = find_weights(call, body.model)
        return make_json_response(_read_prompt(service, body).describe(service, weights))

    return await call.context.run_call(call.caller.owner, work)


async def _chat(request: Request, call: ApiCall) -> Response:
    """Sample replies to a prompt. Stream the prompt, then the tokens of the replies."""
    service = get_service(request)

    def prepare() -> tuple[dict[str, object], ChatRequest]:
        body = schemas.parse_request(call, PlaygroundChat)
        num_samples = sampling_fields.check_num_samples(body.n)
        require(num_samples <= _MAX_SAMPLES, f"n {num_samples}: must be between 1 and {_MAX_SAMPLES} in the playground")
        weights = find_weights(call, body.model)
        prompt = _read_prompt(service, body)

        # Lower `max_tokens` if the prompt is long. The page does not know how long the prompt is.
        params = sampling_fields.make_params(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
        )

        max_tokens = service.limit_tokens(len(prompt.tokens), body.max_tokens)
        chat_request = ChatRequest(
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
        return prompt.describe(service, weights) | {"max_tokens": max_tokens}, chat_request

    # Start the samples and stream them
    described, chat_request = await call.context.run_call(call.caller.owner, prepare)
    [generation] = await service.start_all(call.caller, [chat_request])
    return EventStream(_stream_events(call, service, described, generation, chat_request.num_samples), [generation])


async def _stream_events(
    call: ApiCall, service: ChatService, prompt: dict[str, object], generation: Generation, num_samples: int
) -> AsyncGenerator[bytes]:
    """Yield the events of the replies: the prompt, deltas, and a finish event for each sample, or an error event."""
    try:
        yield encode_event({"type": "prompt", **prompt})
        texts = [TokenTexts(service.text) for _ in range(num_samples)]
        counts = [0] * num_samples
        async for _, delta in merge_deltas([generation]):
            index = delta.index
            counts[index] += len(delta.token_ids)
            yield await run_off_loop(partial(_encode_delta, texts[index], delta), delta.size)
            if delta.finish is not None:
                finish = {"type": "finish", "index": index, "reason": delta.finish.reason, "count": counts[index]}
                yield encode_event(finish)
    except Exception as error:
        yield _make_error_event(call.caller.owner, error)


def _encode_delta(texts: "TokenTexts", delta: Delta) -> bytes:
    tokens = texts.describe([token for part in logprobs.score_delta(delta, _TOP) for token in part])
    return encode_event({"type": "delta", "index": delta.index, "text": delta.text, "tokens": tokens})


def _make_error_event(owner: str, error: Exception) -> bytes:
    """Return the last event of a stream that fails.

    Log the error if it is a bug and not the visitor's mistake.
    """
    match error:
        case ApiError():
            detail = error.detail
        case RequestError():
            detail = error.message
        case _:
            _log.error("playground: the stream ended with an internal error", exc_info=error, extra={"owner": owner})
            detail = "internal error; see the server's log"
    return encode_event({"type": "error", "detail": detail})


async def _score(request: Request, call: ApiCall) -> Response:
    """Return the log-probabilities of a reply under a model, with the top tokens."""
    service = get_service(request)

    # The reply is scored as the last part of a prompt
    def prepare() -> tuple[PlaygroundScore, ChatRequest]:
        body = schemas.parse_request(call, PlaygroundScore)
        weights = find_weights(call, body.model)
        options = PromptOptions(logprobs=True, last_n=len(body.reply_tokens), topk=min(_TOP, service.limits.max_topk))
        return body, ChatRequest(
            weights=weights,
            prompt=[*body.prompt_tokens, *body.reply_tokens],
            params=SamplingParams(seed=0, max_tokens=1),
            options=options,
            needs_text=False,
            kind=sessions.PLAYGROUND,
        )

    body, chat_request = await call.context.run_call(call.caller.owner, prepare)
    [generation] = await service.start_all(call.caller, [chat_request])

    async def work() -> Response:
        async for _ in merge_deltas([generation]):
            pass
        return await call.context.run_call(call.caller.owner, describe_scores)

    def describe_scores() -> Response:
        slices = logprobs.score_prompt(chat_request.prompt, generation.prompt_result, _TOP)
        reply = [scored for part in slices for scored in part][len(body.prompt_tokens) :]
        return make_json_response({"tokens": TokenTexts(service.text).describe(reply)})

    return await respond(request, work(), [generation])


def _read_prompt(service: ChatService, body: PlaygroundPrompt) -> _Prompt:
    """Return the prompt of a request.

    Raises UserError unless it has exactly one prompt that can be rendered.
    """
    present = [name for name in ("messages", "prompt", "prompt_tokens") if getattr(body, name) is not None]
    require(
        len(present) == 1,
        f"messages, prompt, prompt_tokens: the request must have exactly one of them, not {quote_value(present)}",
    )
    require(body.thinking is None or body.messages is not None, "thinking: needs `messages`")

    # Tokens or text
    text = service.text
    if body.prompt_tokens is not None:
        decoded = text.decode(body.prompt_tokens) if text.has_tokenizer else ""
        return _Prompt(decoded, body.prompt_tokens)
    if body.prompt is not None:
        tokens = service.encode(body.prompt, add_special=True)
        require(bool(tokens), "prompt: has no tokens")
        return _Prompt(body.prompt, tokens)

    # A conversation
    messages = body.messages or []
    continues = messages[-1].role == "assistant"
    rendered = prompts.render_prompt(
        service,
        [{"role": message.role, "content": message.content} for message in messages],
        [],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables=None if body.thinking is None else {"enable_thinking": body.thinking},
    )
    stop = () if text.eos_token_id is None else (text.eos_token_id,)
    return _Prompt(rendered.text, rendered.tokens, stop)


class TokenTexts:
    """Describes the tokens of a text that arrives in parts.

    Without a tokenizer, all token texts are empty.
    """

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._detokenizer = Detokenizer(text.decode) if text.has_tokenizer else None

    def read(self, tokens: Iterable[int]) -> list[str]:
        """Return the texts of the next tokens.

        If a character consists of multiple tokens, its last token has the text, and the tokens
        before it have none.
        """
        detokenizer = self._detokenizer
        return ["" if detokenizer is None else detokenizer.feed([token]) for token in tokens]

    def describe(self, scored: Sequence[TokenLogprob]) -> list[dict[str, object]]:
        """Return the next tokens with their log-probabilities and top tokens."""
        return [
            self._describe(score, text)
            for score, text in zip(scored, self.read(score.token for score in scored), strict=True)
        ]

    def _describe(self, scored: TokenLogprob, text: str) -> dict[str, object]:
        described: dict[str, object] = {"id": scored.token, "text": text, "logprob": scored.logprob}
        if not text:
            described["bytes"] = self._format_bytes(scored.token)
        return described | {"top": [(token, self._decode_alone(token), logprob) for token, logprob in scored.top]}

    def _decode_alone(self, token: int) -> str:
        """Return the text of a token, or its bytes such as "<e2 82>" if they are incomplete."""
        if self._detokenizer is None:
            return ""
        content = self._text.decode_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return f"<{content.hex(' ')}>"

    def _format_bytes(self, token: int) -> str:
        return "" if self._detokenizer is None else self._text.decode_bytes(token).hex(" ")
