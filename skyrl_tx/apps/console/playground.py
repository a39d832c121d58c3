"""The calls of the playground's page: stream a reply, render a prompt, score a reply under another model.

The visitor is known by the cookie, never by an API key. The form token comes in the header `X-Form-Token`.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route

from skyrl_tx.apps.chat import logprobs, prompts, sampling_fields
from skyrl_tx.apps.chat.generation import Generation, merge_deltas
from skyrl_tx.apps.chat.models import Weights, find_weights
from skyrl_tx.apps.chat.reply import EventStream, encode_event, get_service, json_response, respond
from skyrl_tx.apps.chat.service import ChatRequest, ChatService, ContextTooLong
from skyrl_tx.apps.console.guard import SECURITY_HEADERS, check_form
from skyrl_tx.apps.console.login import ConsoleSessions, Visitor
from skyrl_tx.apps.console.playground_schemas import PlaygroundChat, PlaygroundPrompt, PlaygroundScore
from skyrl_tx.apps.console.token_texts import TokenTexts
from skyrl_tx.contract.errors import RequestError
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.server.context import ApiContext, Call, held_call
from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.http.body import BodyLimits
from skyrl_tx.server.submission.validation import refuse_extra, require, shown
from skyrl_tx.store import sessions

_log = logging.getLogger(__name__)
MAX_SAMPLES = 8
_TOP = 5
_LIMITS = BodyLimits(max_bytes=2**21, max_parts=2**18)
_NO_STORE = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
Handler = Callable[[Request, Call], Awaitable[Response]]


def playground_routes(context: ApiContext) -> list[Route]:
    """Return the routes."""
    visitors = ConsoleSessions(context.authenticator, context.store, context.signing_key)

    def route(path: str, handler: Handler) -> Route:
        async def serve(request: Request) -> Response:
            visitor = await run_in_threadpool(_admitted, visitors, request)
            async with held_call(request, visitor.principal, _LIMITS) as call:
                response = await handler(request, call)
            response.headers.update(_NO_STORE)
            return response

        return Route(path, serve, methods=["POST"])

    return [route("/console/chat", _chat), route("/console/render", _render), route("/console/score", _score)]


def _admitted(visitors: ConsoleSessions, request: Request) -> Visitor:
    """Return the visitor. Raises ApiError 401 without a console session, 403 for another site or a key that reads."""
    visitor = visitors.visitor(request)
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

    def described(self, service: ChatService, weights: Weights) -> dict[str, object]:
        """Return the prompt with the text of each token, and whose prompt it is."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "texts": TokenTexts(service.text).of(self.tokens),
            "stop": self.stop,
            "model_path": None if weights.path is None else str(weights.path),
        }


async def _render(request: Request, call: Call) -> Response:
    """Return the prompt that a conversation becomes."""
    service = get_service(request)

    def work() -> Response:
        wanted = call.body.model(PlaygroundPrompt)
        weights = find_weights(call, wanted.model)
        return json_response(_prompt(service, call, wanted).described(service, weights))

    return await run_in_threadpool(work)


async def _chat(request: Request, call: Call) -> Response:
    """Continue a prompt; send the prompt, then the tokens as they come."""
    service = get_service(request)

    def prepare() -> tuple[dict[str, object], ChatRequest]:
        wanted = call.body.model(PlaygroundChat)
        num_samples = sampling_fields.check_num_samples(wanted.n)
        require(num_samples <= MAX_SAMPLES, f"n {num_samples}: must be between 1 and {MAX_SAMPLES} in the playground")
        weights = find_weights(call, wanted.model)
        prompt = _prompt(service, call, wanted)
        params = sampling_fields.make_params(
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
        )
        max_tokens = _fitting(service, len(prompt.tokens), wanted.max_tokens)
        return prompt.described(service, weights) | {"max_tokens": max_tokens}, ChatRequest(
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
    events = _events(service, described, generation, start.num_samples)
    return EventStream(events, partial(_error_event, call.caller.owner), [generation])


def _fitting(service: ChatService, num_prompt: int, max_tokens: int) -> int:
    """Return how many new tokens fit after a prompt, at most those asked for. Raises ContextTooLong if none does."""
    limit = service.limits.max_context_length
    if limit is None:
        return max_tokens
    if num_prompt >= limit:
        raise ContextTooLong(num_prompt, None, limit)
    return min(max_tokens, limit - num_prompt)


async def _events(
    service: ChatService, prompt: dict[str, object], generation: Generation, num_samples: int
) -> AsyncGenerator[bytes]:
    """Yield the events of a reply."""
    yield encode_event({"type": "prompt", **prompt})
    texts = [TokenTexts(service.text) for _ in range(num_samples)]
    counts = [0] * num_samples
    async for _, delta in merge_deltas([generation]):
        index = delta.index
        counts[index] += len(delta.token_ids)
        tokens = texts[index].described(logprobs.score_delta(delta, _TOP))
        yield encode_event({"type": "delta", "index": index, "text": delta.text, "tokens": tokens})
        if delta.finish is not None:
            yield encode_event(
                {"type": "finish", "index": index, "reason": delta.finish.reason, "count": counts[index]}
            )


def _error_event(owner: str, error: Exception) -> bytes:
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


async def _score(request: Request, call: Call) -> Response:
    """Return the log-probabilities of a reply under a model, with the likeliest tokens of each position."""
    service = get_service(request)

    def prepare() -> tuple[PlaygroundScore, ChatRequest]:
        wanted = call.body.model(PlaygroundScore)
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
        return await run_in_threadpool(scored)

    def scored() -> Response:
        tokens = logprobs.score_prompt(start.prompt, generation.prompt_result, _TOP)[len(wanted.prompt_tokens) :]
        return json_response({"tokens": TokenTexts(service.text).described(tokens)})

    return await respond(request, work(), [generation])


def _prompt(service: ChatService, call: Call, wanted: PlaygroundPrompt) -> _Prompt:
    """Return the prompt of a request. Raises UserError for a request that has none or several, or that is not text."""
    call.check_unknown(wanted)
    given = [name for name in ("messages", "prompt", "prompt_tokens") if getattr(wanted, name) is not None]
    require(len(given) == 1, f"messages, prompt, prompt_tokens: exactly one is needed, not {shown(given)}")
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
    rendered = prompts.render(
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
