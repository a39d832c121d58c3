"""OpenAI's completions API: `POST /completions`.

A prompt is text or token ids. The response can contain the prompt and the log-probabilities of the
prompt tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fastapi import Request, Response

from skyrl_tx.apps.chat import logprobs, sampling_fields, schemas
from skyrl_tx.apps.chat.generation import Delta, Finish
from skyrl_tx.apps.chat.models import find_weights
from skyrl_tx.apps.chat.reply import JsonObject, OpenAiReply, serve
from skyrl_tx.apps.chat.schemas import CompletionRequest
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.submission.validation import quote_value, require

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024


async def create_completion(request: Request) -> Response:
    """Sample continuations of one or multiple prompts."""
    return await serve(request, _prepare)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt. `text` is None if the client sent token ids."""

    text: str | None
    tokens: list[int]


def _prepare(service: ChatService, call: ApiCall) -> "_Completion":
    """Check a request and encode its prompts.

    Raises ApiError or UserError if the request cannot be served.
    """
    # The fields that need no tokenizer
    request = schemas.parse_request(call, CompletionRequest)
    weights = find_weights(call, request.model)
    require(not request.suffix, f"suffix {quote_value(request.suffix)}: is not supported", field="suffix")
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    require(
        max_tokens != 0 or bool(request.echo),
        "max_tokens 0: needs `echo` true, or there is nothing to return",
        field="max_tokens",
    )

    # Log-probabilities and sampling parameters
    top = sampling_fields.check_top_k(request.logprobs, "logprobs", service.limits)
    prompt_top = sampling_fields.check_top_k(request.prompt_logprobs, "prompt_logprobs", service.limits)
    scores_prompt = request.prompt_logprobs is not None or bool(request.echo and request.logprobs is not None)
    params = sampling_fields.convert_openai_fields(service, request, max_tokens or 1, "max_tokens")
    constraint = sampling_fields.read_constraint(request, call.caller.owner)
    params = sampling_fields.add_constraint(service, params, constraint)
    num_samples = sampling_fields.check_num_samples(request.n)
    options = PromptOptions(
        logprobs=scores_prompt,
        topk=max(prompt_top, top if request.echo else 0) if scores_prompt else 0,
        sample_topk=top,
    )

    # One request for each prompt
    prompts = _read_prompts(service, request)
    requests = [
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

    service.check_sizes(requests, has_token_logprobs=request.logprobs is not None)
    return _Completion(service, request, prompts, requests, drops_tokens=max_tokens == 0)


def _read_prompts(service: ChatService, request: CompletionRequest) -> list[_Prompt]:
    """Return the prompts of a request as tokens.

    The field `prompt` is one text, a list of texts, one list of token ids, or a list of such lists.
    """
    # Make a list of any of the four forms
    field_value = request.prompt
    if isinstance(field_value, str):
        listed: Sequence[str | list[int]] = [field_value]
    elif field_value and all(isinstance(token, int) for token in field_value):
        listed = [[token for token in field_value if isinstance(token, int)]]
    else:
        listed = [prompt for prompt in field_value if not isinstance(prompt, int)]
    require(bool(listed), "prompt: must not be empty", field="prompt")
    require(
        len(listed) <= _MAX_PROMPTS,
        f"prompt has {len(listed)} prompts: must have at most {_MAX_PROMPTS}",
        field="prompt",
    )

    # Encode texts
    prompts: list[_Prompt] = []
    for prompt in listed:
        if isinstance(prompt, str):
            tokens = service.encode(prompt, add_special=request.add_special_tokens is not False)
            prompts.append(_Prompt(prompt, tokens))
        else:
            is_valid = all(0 <= token < 2**31 for token in prompt)
            require(is_valid, "prompt: token ids must be between 0 and 2^31 - 1", field="prompt")
            prompts.append(_Prompt(None, prompt))
        require(bool(prompts[-1].tokens), "prompt: has no tokens", field="prompt")
    return prompts


class _Completion(OpenAiReply):
    """Builds the choices of the response. Sample s of prompt p is choice `p * n + s`."""

    id_prefix = "cmpl-"
    object_names = "text_completion", "text_completion"

    def __init__(
        self,
        service: ChatService,
        request: CompletionRequest,
        prompts: Sequence[_Prompt],
        requests: Sequence[ChatRequest],
        *,
        drops_tokens: bool,
    ) -> None:
        """With `drops_tokens`, sampled tokens are not returned.

        This is for `max_tokens` 0: the engine samples at least one token, and the client asked for
        none.
        """
        super().__init__(service, request, requests)
        self._request = request
        self._prompts = prompts
        self._num_samples = requests[0].num_samples
        self._drops_tokens = drops_tokens

        self._top = request.logprobs or 0
        num_choices = len(prompts) * self._num_samples
        self.num_dropped = num_choices if drops_tokens else 0
        self._started: set[int] = set()
        """The choices that have begun in the response."""
        self._logprobs: list[logprobs.CompletionLogprobs] = []
        """One per choice, if the client asked for log-probabilities."""
        if request.logprobs is not None:
            hidden = service.text.find_hidden_tokens() if requests[0].skip_special else frozenset[int]()
            self._logprobs = [logprobs.CompletionLogprobs(service.text, hidden) for _ in range(num_choices)]

    def make_choice(self, prompt_index: int, delta: Delta) -> JsonObject:
        """Return the choice of a sample with its new text, tokens and log-probabilities.

        The first time, this includes what the client asked for about the prompt: its text, tokens
        and log-probabilities.
        """
        if self._drops_tokens:
            delta = _drop_tokens(delta)
        index = prompt_index * self._num_samples + delta.index
        text, echo = delta.text, None
        more: JsonObject = {"token_ids": delta.token_ids.tolist()} if self._request.return_token_ids else {}

        if index not in self._started:
            self._started.add(index)
            text = self._echo(prompt_index) + text
            if self._request.echo and self._logprobs:
                tokens, scored = self.requests[prompt_index].prompt, self.score_prompt(prompt_index, self._top)
                echo = logprobs.Echo(self._echo(prompt_index), tokens, scored)
            more |= self.describe_prompt(prompt_index)

        described = None
        if self._logprobs:
            described = self._logprobs[index].describe(logprobs.score_delta(delta, self._top), echo)
        reason = None if delta.finish is None else delta.finish.reason
        return {"index": index, "text": text, "logprobs": described, "finish_reason": reason, **more}

    def make_events(self, prompt_index: int, delta: Delta) -> Iterator[JsonObject]:
        """Yield one event with everything that is new in a choice, or nothing if nothing is new."""
        if self._drops_tokens:
            delta = _drop_tokens(delta)
        is_started = prompt_index * self._num_samples + delta.index in self._started
        shows_prompt = not is_started and bool(self._echo(prompt_index))
        shows_tokens = len(delta.token_ids) > 0 and bool(self._logprobs or self._request.return_token_ids)
        if delta.text or delta.finish is not None or shows_prompt or shows_tokens:
            yield self.make_chunk([self.make_choice(prompt_index, delta)])

    def _echo(self, prompt_index: int) -> str:
        """Return the text of a prompt if the client set `echo`, else an empty text."""
        if not self._request.echo:
            return ""
        prompt = self._prompts[prompt_index]
        return self.text.decode(prompt.tokens) if prompt.text is None else prompt.text


def _drop_tokens(delta: Delta) -> Delta:
    """Return a delta without tokens and text. A sample whose tokens are dropped ends because of its length."""
    finish = None if delta.finish is None else Finish("length")
    return replace(delta, token_ids=delta.token_ids[:0], logprobs=delta.logprobs[:0], topk=None, text="", finish=finish)
