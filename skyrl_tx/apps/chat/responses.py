"""Responses of OpenAI's API: JSON, and the object `usage`."""

from collections.abc import Sequence

import msgspec
from fastapi import Response

from skyrl_tx.apps.chat.generation import Generation


def json_response(body: object) -> Response:
    """Return a body as JSON, which is written much faster than by the framework."""
    return Response(msgspec.json.encode(body), media_type="application/json")


def usage_of(
    generations: Sequence[Generation], prompt_lengths: Sequence[int], *, dropped: int = 0
) -> dict[str, object]:
    """Return the tokens of a response; `dropped` sampled ones were not asked for."""
    num_prompt = sum(prompt_lengths)
    num_sampled = sum(generation.num_tokens for generation in generations) - dropped
    cached = sum(generation.prompt_result.cache_hit_tokens for generation in generations)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
