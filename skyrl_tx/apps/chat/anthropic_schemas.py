"""Requests of Anthropic's Messages API."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, WireModel

_MAX_MESSAGES = 10_000
_MAX_BLOCKS = 4096
_MAX_TOOLS = 512


class Block(WireModel):
    """A block of content: text, tool_use, tool_result or thinking."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: "str | Annotated[List[Block], Field(max_length=_MAX_BLOCKS)] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    cache_control: object = None
    citations: object = None


Content = str | Annotated[List[Block], Field(max_length=_MAX_BLOCKS)]


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
