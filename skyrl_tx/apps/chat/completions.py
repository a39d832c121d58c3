"""OpenAI's completions: text or tokens in, text out, with exact log-probabilities of both."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import Request, Response

from skyrl_tx.apps.chat import calls, logprobs, sampling_fields
from skyrl_tx.apps.chat.generation import Delta, Generation
from skyrl_tx.apps.chat.logprobs import TokenLogprob
from skyrl_tx.apps.chat.openai_schemas import CompletionRequest
from skyrl_tx.apps.chat.responses import json_response, usage_of
from skyrl_tx.apps.chat.server_sent_events import DONE, EventStream, event
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.server.context import Call
from skyrl_tx.server.submission.validation import require, shown

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A checked request."""

    request: CompletionRequest
    prompts: list[_Prompt]
    starts: list[ChatRequest]
    num_samples: int
    drops_tokens: bool
    """Whether `max_tokens` is 0: the sampled token, without which there is no sample, is not shown."""


async def completions(request: Request) -> Response:
    """Continue text or tokens."""
    service = calls.service_of(request)

    async def prepare(call: Call) -> _Prepared:
        return await calls.in_thread(_prepare, service, call)

    call, prepared = await calls.received(request, prepare)
    generations = await service.start_all(call.caller, prepared.starts)
    head = {
        "id": calls.new_id("cmpl-"),
        "object": "text_completion",
        "created": calls.now(),
        "model": prepared.request.model,
        "system_fingerprint": service.limits.fingerprint,
    }
    response = _Choices(service, prepared, generations)
    if prepared.request.stream:
        body = calls.error_event("openai", request)
        return EventStream(response.events(head), lambda error: event(body(error)) + DONE, calls.closing(generations))
    return await calls.answered(request, response.whole(head), generations)


def _prepare(service: ChatService, call: Call) -> _Prepared:
    request = call.body.model(CompletionRequest)
    call.check_unknown(request)
    weights = calls.weights_of(call, request.model)
    require(not request.suffix, f"suffix {shown(request.suffix)}: is not supported")
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    drops_tokens = max_tokens == 0
    require(not drops_tokens or bool(request.echo), "max_tokens 0: needs echo")
    limits = service.limits
    top = sampling_fields.top_k_logprobs(request.logprobs, "logprobs", limits)
    prompt_top = sampling_fields.top_k_logprobs(request.prompt_logprobs, "prompt_logprobs", limits)
    scores_prompt = request.prompt_logprobs is not None or bool(request.echo and request.logprobs is not None)
    params = sampling_fields.of_openai(request, max_tokens or 1, "max_tokens")
    num_samples = sampling_fields.num_samples(request.n)
    prompts = _prompts(service, request)
    options = PromptOptions(
        logprobs=scores_prompt,
        topk=max(prompt_top, top if request.echo else 0) if scores_prompt else 0,
        sample_topk=top,
    )
    starts = [
        ChatRequest(
            weights=weights,
            prompt=prompt.tokens,
            params=params,
            options=options,
            num_samples=num_samples,
            is_streamed=bool(request.stream),
            keep_stop=bool(request.include_stop_str_in_output),
            skip_special=request.skip_special_tokens is not False,
            needs_text=prompt.text is not None or not request.return_token_ids,
        )
        for prompt in prompts
    ]
    for start in starts:
        service.check_length(len(start.prompt), start.params.max_tokens)
    return _Prepared(request, prompts, starts, num_samples, drops_tokens)


def _prompts(service: ChatService, request: CompletionRequest) -> list[_Prompt]:
    given = request.prompt
    if isinstance(given, str):
        listed: Sequence[str | list[int]] = [given]
    elif given and all(isinstance(token, int) for token in given):
        listed = [[token for token in given if isinstance(token, int)]]
    else:
        listed = [each for each in given if not isinstance(each, int)]
    require(bool(listed), "prompt: must not be empty")
    require(len(listed) <= 1024, f"prompt has {len(listed)} prompts: must have at most 1024")
    prompts: list[_Prompt] = []
    for each in listed:
        if isinstance(each, str):
            tokens = service.text.encode(each, add_special=request.add_special_tokens is not False)
            prompts.append(_Prompt(each, tokens))
        else:
            require(all(0 <= token < 2**31 for token in each), "prompt: a token id is negative or too large")
            prompts.append(_Prompt(None, each))
        require(bool(prompts[-1].tokens), "prompt: has no tokens")
    return prompts


@dataclass(slots=True)
class _Choice:
    """The state of one choice."""

    logprobs: logprobs.CompletionLogprobs | None
    text: list[str] = field(default_factory=list[str])
    tokens: list[int] = field(default_factory=list[int])
    scored: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None


class _Choices:
    """The choices of a response, by prompt and sample."""

    def __init__(self, service: ChatService, prepared: _Prepared, generations: Sequence[Generation]) -> None:
        self._text = service.text
        self._prepared = prepared
        self._request = prepared.request
        self._generations = generations
        self._top = prepared.request.logprobs or 0
        wants = prepared.request.logprobs is not None
        self._choices = [
            _Choice(logprobs.CompletionLogprobs(service.text) if wants else None)
            for _ in range(len(generations) * prepared.num_samples)
        ]

    async def whole(self, head: Mapping[str, object]) -> Response:
        """Return the response once all samples are complete."""
        async for number, delta in calls.merged(self._generations):
            choice = self._choice(number, delta)
            choice.text.append(delta.text)
            choice.tokens += delta.token_ids.tolist()
            if choice.logprobs is not None:
                choice.scored += logprobs.of_delta(delta, self._top)
            if delta.finish is not None:
                choice.finish_reason = delta.finish.reason
        return await calls.in_thread(
            lambda: json_response(
                {
                    **head,
                    "choices": [self._object(index) for index in range(len(self._choices))],
                    "usage": self._usage(),
                }
            )
        )

    def _choice(self, number: int, delta: Delta) -> _Choice:
        return self._choices[number * self._prepared.num_samples + delta.index]

    def _object(self, index: int) -> dict[str, object]:
        number, choice = index // self._prepared.num_samples, self._choices[index]
        if self._prepared.drops_tokens:
            choice.text, choice.tokens, choice.scored, choice.finish_reason = [], [], [], "length"
        made: dict[str, object] = {
            "index": index,
            "text": self._echoed(number) + "".join(choice.text),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        prompt, generation = self._prepared.prompts[number], self._generations[number]
        if choice.logprobs is not None:
            scored = choice.scored
            if self._request.echo:
                scored = logprobs.of_prompt(prompt.tokens, generation.prompt_result, self._top) + scored
            made["logprobs"] = choice.logprobs.object(scored)
        if (k := self._request.prompt_logprobs) is not None:
            tokens = logprobs.of_prompt(prompt.tokens, generation.prompt_result, k)
            made["prompt_logprobs"] = logprobs.prompt_logprobs(self._text, tokens, k)
        if self._request.return_token_ids:
            made |= {"token_ids": choice.tokens, "prompt_token_ids": prompt.tokens}
        return made

    def _echoed(self, number: int) -> str:
        """Return the prompt's text if the client wants it."""
        if not self._request.echo:
            return ""
        prompt = self._prepared.prompts[number]
        return self._text.text_of(prompt.tokens, skip_special=False) if prompt.text is None else prompt.text

    def _usage(self) -> dict[str, object]:
        dropped = len(self._choices) if self._prepared.drops_tokens else 0
        return usage_of(self._generations, [len(prompt.tokens) for prompt in self._prepared.prompts], dropped=dropped)

    async def events(self, head: Mapping[str, object]) -> AsyncGenerator[bytes]:
        """Yield the chunks of a streamed response."""
        options = self._request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        started: set[int] = set()
        async for number, delta in calls.merged(self._generations):
            index = number * self._prepared.num_samples + delta.index
            chunk = self._chunk(number, index, delta, is_first=index not in started)
            if chunk is None:
                continue
            started.add(index)
            yield event({**head, "choices": [chunk], **({"usage": None} if with_usage else {})})
        if with_usage:
            yield event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _chunk(self, number: int, index: int, delta: Delta, *, is_first: bool) -> dict[str, object] | None:
        choice = self._choices[index]
        text, scored = delta.text, list[TokenLogprob]()
        tokens: list[int] = delta.token_ids.tolist()
        finish = None if delta.finish is None else delta.finish.reason
        if self._prepared.drops_tokens:
            text, tokens, finish = "", [], None if finish is None else "length"
        elif choice.logprobs is not None:
            scored = logprobs.of_delta(delta, self._top)
        if is_first:
            text = self._echoed(number) + text
            if self._request.echo and choice.logprobs is not None:
                prompt = self._prepared.prompts[number].tokens
                scored = logprobs.of_prompt(prompt, self._generations[number].prompt_result, self._top) + scored
        wants_tokens = bool(self._request.return_token_ids)
        if not text and finish is None and not scored and not (wants_tokens and tokens):
            return None
        made: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": choice.logprobs.object(scored) if choice.logprobs is not None else None,
            "finish_reason": finish,
        }
        if wants_tokens:
            made["token_ids"] = tokens
            if is_first:
                made["prompt_token_ids"] = self._prepared.prompts[number].tokens
        if is_first and (k := self._request.prompt_logprobs) is not None:
            result = self._generations[number].prompt_result
            scored_prompt = logprobs.of_prompt(self._prepared.prompts[number].tokens, result, k)
            made["prompt_logprobs"] = logprobs.prompt_logprobs(self._text, scored_prompt, k)
        return made
