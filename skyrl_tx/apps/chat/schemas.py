"""Requests of OpenAI's API, with the further fields that vLLM and SGLang made common, and of Anthropic's Messages API.

A field that would change the result and is not listed is refused by its name. Fields with a neutral value are listed so
that clients may send it.
"""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, WireModel

_MAX_PROMPTS = 1024
_MAX_MESSAGES = 10_000
_MAX_TOOLS = 512
_MAX_BLOCKS = 4096


class StreamOptions(WireModel):
    """Options of a streamed response."""

    changes_maths = True
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(WireModel):
    """The fields that both kinds of completion share."""

    changes_maths = True
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
    # Only the neutral value is supported
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    best_of: Int | None = None
    # Without effect on the result
    user: str | None = None
    metadata: object = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(GenerationFields):
    """Text or tokens to continue."""

    prompt: str | List[int] | Annotated[List[str], Field(max_length=_MAX_PROMPTS)] | List[List[int]]
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class FunctionCall(WireModel):
    """The function that a call names, with its arguments as JSON text."""

    changes_maths = True
    name: str
    arguments: str = "{}"


class MessageToolCall(WireModel):
    """A call that the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Int | None = None


class ContentPart(WireModel):
    """A part of a message. Only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(WireModel):
    """One message."""

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


class Function(WireModel):
    """The function of a tool; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class ResponseFormat(WireModel):
    """The form of the response. Only text is supported."""

    type: str


class ChatCompletionRequest(GenerationFields):
    """A conversation to continue."""

    messages: Annotated[List[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[List[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: List[str] | None = None
    verbosity: str | None = None


class ContentBlock(WireModel):
    """A block of content: text, tool_use, tool_result or thinking."""

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
    cache_control: object = None
    citations: object = None


Content = str | Annotated[List[ContentBlock], Field(max_length=_MAX_BLOCKS)]


class AnthropicMessage(WireModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(WireModel):
    """A tool that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    cache_control: object = None


class ToolChoice(WireModel):
    """Whether the model may call tools."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    """Whether the model reasons first. Its budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: str | None = None


class OutputConfig(WireModel):
    """The form of the response. Only free text is supported."""

    format: object = None
    effort: str | None = None


class CountTokensRequest(WireModel):
    """A conversation."""

    changes_maths = True
    model: str
    messages: Annotated[List[AnthropicMessage], Field(min_length=1, max_length=_MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[List[AnthropicTool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: object = None
    # Without effect on the prompt
    context_management: object = None
    betas: object = None


class MessagesRequest(CountTokensRequest):
    """A conversation to continue."""

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
