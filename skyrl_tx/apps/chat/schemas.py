"""Request schemas of OpenAI's completions and chat completions, and of Anthropic's Messages API.

The OpenAI schemas include extensions that vLLM and SGLang have made common, for example
`prompt_logprobs`. A request with an unknown field gets an error, because the field could change the
result. Some fields are listed here although they have no effect, or only one value is supported, so
that clients that send them still work.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Self, TypeVar, cast

from pydantic import Field, PrivateAttr, model_validator

from skyrl_tx.server.context import ApiCall
from skyrl_tx.server.schemas.base import Int, List, WireModel
from skyrl_tx.server.submission.validation import quote_value, require

_MAX_PROMPTS = 1024
_MAX_MESSAGES = 10_000
_MAX_TOOLS = 512
_MAX_BLOCKS = 4096


ModelT = TypeVar("ModelT", bound=WireModel)


class StreamOptions(WireModel):
    """Options for streaming."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(WireModel):
    """A JSON schema that the content has to match. `strict` is accepted; every schema is enforced."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    """The format of the response: "text", "json_object" or "json_schema"."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(WireModel):
    """A constraint of the text, as vLLM defines it. Exactly one field can be set."""

    json_: dict[str, object] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationFields(WireModel):
    """Fields that completions and chat completions share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    n: Int | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: Int | None = None
    logit_bias: dict[str, float] | None = None
    # Must be equal to `n`
    best_of: Int | None = None
    # Without effect on the result
    user: str | None = None
    metadata: object = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: object = None


class CompletionRequest(GenerationFields):
    """A request for completions of one or multiple prompts."""

    prompt: str | List[int] | Annotated[List[str], Field(max_length=_MAX_PROMPTS)] | List[List[int]]
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class FunctionCall(WireModel):
    """The function that a tool call names. `arguments` is JSON as text."""

    name: str
    arguments: str = "{}"


class MessageToolCall(WireModel):
    """A tool call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Int | None = None


class ContentPart(WireModel):
    """A part of a message's content. Parts that are not text get an error that names their type."""

    type: str
    text: str | None = None
    image_url: object = None
    input_audio: object = None
    file: object = None
    # Without effect on the result
    cache_control: object = None
    prompt_cache_breakpoint: object = None


class ChatMessage(WireModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[List[ContentPart], Field(max_length=_MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: List[MessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: object = None
    audio: object = None
    function_call: object = None
    cache_control: object = None


class Function(WireModel):
    """The function of a tool. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """A tool that the model may call. `original` is the object as the client sent it.

    Chat templates write the whole tool into the prompt, with its fields in the client's order.
    """

    type: Literal["function"] = "function"
    function: Function
    _original: Mapping[str, object] = PrivateAttr(default_factory=dict[str, object])

    @property
    def original(self) -> Mapping[str, object]:
        """The tool as the client sent it."""
        return self._original

    @model_validator(mode="wrap")
    @classmethod
    def _keep_original(cls, value: object, validate: Callable[[object], Self]) -> Self:
        tool = validate(value)
        tool._original = {**cast(Mapping[str, object], value), "type": tool.type}
        return tool


class ChatCompletionRequest(GenerationFields):
    """A request for the next message of a conversation."""

    messages: Annotated[List[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[List[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: List[str] | None = None
    verbosity: str | None = None


class ContentBlock(WireModel):
    """A content block. The supported types are text, tool_use, tool_result and thinking."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: "str | Annotated[List[ContentBlock], Field(max_length=_MAX_BLOCKS)] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    # Images, documents and redacted reasoning
    source: object = None
    data: object = None
    # Without effect on the result
    cache_control: object = None
    citations: object = None
    caller: object = None
    toolset_name: str | None = None


Content = str | Annotated[List[ContentBlock], Field(max_length=_MAX_BLOCKS)]


class AnthropicMessage(WireModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(WireModel):
    """A tool that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    # Without effect on the result
    cache_control: object = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: object = None
    input_examples: object = None


class ToolChoice(WireModel):
    """Whether the model may call tools."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    """Whether the model reasons before it answers. `budget_tokens` is accepted but not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: str | None = None


class OutputFormat(WireModel):
    """The format of the response. `type` is "json_schema"."""

    type: str
    schema_: dict[str, object] | None = Field(None, alias="schema")


class OutputConfig(WireModel):
    """The format of the response, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(WireModel):
    """A request to count the prompt tokens of a conversation."""

    model: str
    messages: Annotated[List[AnthropicMessage], Field(min_length=1, max_length=_MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[List[AnthropicTool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, object] | None = None
    enable_thinking: bool | None = None
    # Without effect on the prompt
    cache_control: object = None
    context_management: object = None
    betas: object = None
    speed: str | None = None
    diagnostics: object = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """A request for the next message of a conversation."""

    max_tokens: Int
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stop_sequences: List[str] | None = None
    stream: bool | None = None
    # Without effect on the result
    metadata: object = None
    service_tier: str | None = None
    inference_geo: str | None = None
    container: object = None
    mcp_servers: object = None


def parse_request(call: ApiCall, kind: type[ModelT]) -> ModelT:
    """Parse the body of a request. Raises ApiError or UserError that names the first wrong field."""
    request = call.body.parse_model(kind)
    _refuse_unknown(request, "")
    return request


def _refuse_unknown(value: object, where: str) -> None:
    """Raise UserError for an unknown field that is not null, at any depth.

    The SDK of the Tinker API sends the defaults of fields that a server may not know. Clients of
    the OpenAI and Anthropic APIs send a field only to use it, for example with the value false.
    """
    if isinstance(value, list):
        parts = cast(list[object], value)
        for index, part in enumerate(parts if parts and isinstance(parts[0], WireModel) else ()):
            _refuse_unknown(part, f"{where}[{index}]")
    if not isinstance(value, WireModel):
        return

    prefix = f"{where}." if where else ""
    for name, unknown in (value.model_extra or {}).items():
        path = f"{prefix}{name}"
        require(unknown is None, f"{path} {quote_value(unknown)}: this server does not know the field", field=path)
    for name in value.model_fields_set:
        _refuse_unknown(getattr(value, name), f"{prefix}{name}")
