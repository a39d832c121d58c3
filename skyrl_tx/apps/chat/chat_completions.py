"""OpenAI's chat completions API: `POST /chat/completions`."""

from collections.abc import Iterator, Sequence
from typing import cast

from fastapi import Request, Response

from skyrl_tx.apps.chat import logprobs, prompts, sampling_fields, schemas
from skyrl_tx.apps.chat.generation import Delta
from skyrl_tx.apps.chat.message import Part, TextPart
from skyrl_tx.apps.chat.models import find_weights
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reply import JsonObject, OpenAiReply, serve
from skyrl_tx.apps.chat.reply_grammars import ForcedCall, constrain_reply
from skyrl_tx.apps.chat.schemas import ChatCompletionRequest
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.apps.chat.tool_calls import ToolCall
from skyrl_tx.contract.errors import FieldError
from skyrl_tx.contract.requests import PromptOptions
from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.submission.validation import quote_value, require


async def create_chat_completion(request: Request) -> Response:
    """Sample the next message of a conversation."""
    return await serve(request, _prepare)


def _prepare(service: ChatService, call: ApiCall) -> "_ChatCompletion":
    """Check a request and render its prompt.

    Raises ApiError or UserError if the request cannot be served.
    """
    request = schemas.parse_request(call, ChatCompletionRequest)
    _check(request)
    weights = find_weights(call, request.model)

    # Log-probabilities and sampling parameters
    top = sampling_fields.check_top_k(request.top_logprobs, "top_logprobs", service.limits)
    prompt_top = sampling_fields.check_top_k(request.prompt_logprobs, "prompt_logprobs", service.limits)
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    params = sampling_fields.convert_openai_fields(service, request, getattr(request, limit_name), limit_name)

    # Render the prompt
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    require(
        not (continues and generates),
        "continue_final_message: cannot be combined with `add_generation_prompt` true; set one of the two",
        field="continue_final_message",
    )

    messages = request.messages
    prompt = prompts.render_prompt(
        service,
        [prompts.convert_openai_message(message, f"messages[{index}]") for index, message in enumerate(messages)],
        [tool.original for tool in request.tools or []] if request.tool_choice != "none" else [],
        add_generation_prompt=generates,
        continue_final_message=continues,
        variables=_read_variables(request),
    )

    # The request for the engine
    owner = call.caller.owner
    content = sampling_fields.read_constraint(request, owner)
    params = constrain_reply(service, prompt, params, owner, content, _read_forced_call(request))

    prepared = ChatRequest(
        weights=weights,
        prompt=prompt.tokens,
        params=params,
        options=PromptOptions(
            logprobs=request.prompt_logprobs is not None, topk=prompt_top, sample_topk=top if request.logprobs else 0
        ),
        num_samples=sampling_fields.check_num_samples(request.n),
        is_streamed=bool(request.stream),
        keep_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        delimiters=prompt.delimiters,
    )

    service.check_sizes([prepared], has_token_logprobs=bool(request.logprobs))
    return _ChatCompletion(service, request, prompt, prepared)


def _read_forced_call(request: ChatCompletionRequest) -> ForcedCall | None:
    """Return which tool calls `tool_choice` demands, or None."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    name = None if choice == "required" else _read_named(choice)
    return ForcedCall(name, "function.parameters", name is not None or request.parallel_tool_calls is False)


def _read_named(choice: object) -> str:
    """Return the name of the function in a `tool_choice`. Raises UserError for other forms."""
    value = cast(dict[str, object], choice) if isinstance(choice, dict) else {}
    function = value.get("function")
    name = cast(dict[str, object], function).get("name") if isinstance(function, dict) else None
    if value.get("type") == "function" and isinstance(name, str):
        return name
    raise FieldError(
        f"tool_choice {quote_value(choice)}: must be 'auto', 'none', 'required', or an object with the name of a "
        "function",
        "tool_choice",
    )


def _check(request: ChatCompletionRequest) -> None:
    """Raise UserError if a request asks for a feature that this server does not have."""
    require(
        request.modalities in (None, ["text"]),
        f"modalities {quote_value(request.modalities)}: this server supports only ['text']",
        field="modalities",
    )
    verbosity = request.verbosity
    require(verbosity in (None, "medium"), f"verbosity {quote_value(verbosity)}: is not supported", field="verbosity")
    require(
        not request.top_logprobs or bool(request.logprobs),
        "top_logprobs: needs `logprobs` true",
        field="top_logprobs",
    )


def _read_variables(request: ChatCompletionRequest) -> dict[str, object]:
    """Return the variables for the chat template.

    `reasoning_effort` "none" sets `enable_thinking` to False.
    """
    effort = request.reasoning_effort
    variables = prompts.read_variables(
        request.chat_template_kwargs,
        [
            ("reasoning_effort", "reasoning_effort", effort),
            ("enable_thinking", "enable_thinking", request.enable_thinking),
        ],
    )
    return {"enable_thinking": False, **variables} if effort == "none" else variables


class _ChatCompletion(OpenAiReply):
    """Builds the choices of the response. Each sample becomes one message."""

    id_prefix = "chatcmpl-"
    object_names = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: ChatService, request: ChatCompletionRequest, prompt: ChatPrompt, prepared: ChatRequest
    ) -> None:
        super().__init__(service, request, [prepared])
        self._request = request
        self._top = request.top_logprobs or 0
        self._has_described_prompt = False
        self._readers = [
            prompt.create_reader(
                separates_reasoning=request.separate_reasoning is not False,
                has_one_call=request.parallel_tool_calls is False,
            )
            for _ in range(prepared.num_samples)
        ]
        self._num_calls = [0] * prepared.num_samples
        """How many tool calls the stream has sent of each sample."""

    def make_body(self, samples: Sequence[tuple[int, Delta]]) -> JsonObject:
        """Return the body of a response that is not streamed."""
        return super().make_body(samples) | self.describe_prompt(0)

    def make_choice(self, prompt_index: int, delta: Delta) -> JsonObject:
        """Return the choice of a sample in a response that is not streamed."""
        parts = self._readers[delta.index].read(delta)
        choice: JsonObject = {"index": delta.index, "message": _make_message(parts), "logprobs": None}
        return choice | {"finish_reason": self._get_finish_reason(delta)} | self._describe_tokens(delta)

    def _get_finish_reason(self, delta: Delta) -> str | None:
        """Return why a sample has finished, or None if it has not.

        The reason is "tool_calls" if the message has tool calls and the sample was not cut off by
        `max_tokens`.
        """
        if delta.finish is None:
            return None
        is_call = self._readers[delta.index].has_calls and delta.finish.reason == "stop"
        return "tool_calls" if is_call else delta.finish.reason

    def make_first_events(self) -> Iterator[JsonObject]:
        """Yield an empty message of the assistant for each choice."""
        for index in range(len(self._readers)):
            yield self._make_event(index, {"role": "assistant", "content": ""})

    def _make_event(self, index: int, delta: JsonObject, token_fields: JsonObject | None = None) -> JsonObject:
        choice: JsonObject = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.make_chunk([choice | (token_fields or {})])

    def make_events(self, prompt_index: int, delta: Delta) -> Iterator[JsonObject]:
        """Yield an event for each new part of a message.

        The first event also describes the new tokens.
        """
        index = delta.index
        parts = self._readers[index].read(delta)
        token_fields = self._describe_tokens(delta)

        if not self._has_described_prompt and (prompt_fields := self.describe_prompt(0)):
            yield self.make_chunk([], prompt_fields)
        self._has_described_prompt = True

        for part in parts:
            yield self._make_event(index, self._make_delta(index, part), token_fields)
            token_fields = {}
        if (reason := self._get_finish_reason(delta)) is not None:
            yield self._make_event(index, {}, token_fields | {"finish_reason": reason})
        elif any(token_fields.values()):
            yield self._make_event(index, {"content": ""}, token_fields)

    def _make_delta(self, index: int, part: Part) -> JsonObject:
        """Return the `delta` object that adds a part to a message."""
        if isinstance(part, TextPart):
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        call = {"index": self._num_calls[index], **_make_call(part)}
        self._num_calls[index] += 1
        return {"tool_calls": [call]}

    def _describe_tokens(self, delta: Delta) -> JsonObject:
        """Return the token ids and log-probabilities of a delta, if the client asked for them.

        The text of these tokens may follow in a later event, for example while a character is
        incomplete.
        """
        described: JsonObject = {}
        if self._request.logprobs and len(delta.token_ids):
            content = logprobs.describe_chat(self.text, logprobs.score_delta(delta, self._top), with_top=self._top > 0)
            described["logprobs"] = {"content": content, "refusal": None}
        if self._request.return_token_ids:
            described["token_ids"] = delta.token_ids.tolist()
        return described


def _make_message(parts: Sequence[Part]) -> JsonObject:
    """Return the message of the assistant, with its reasoning and tool calls."""
    pieces = [part for part in parts if isinstance(part, TextPart)]
    calls = [_make_call(part) for part in parts if not isinstance(part, TextPart)]
    content = "".join(piece.text for piece in pieces if piece.kind == "content")
    reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    message: JsonObject = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _make_call(call: ToolCall) -> JsonObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
