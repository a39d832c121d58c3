"""Requests of the playground's page."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tx.server.schemas.base import Int, List, WireModel

_MAX_MESSAGES = 1000
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
