"""Completions and chat through the `openai` package: `python openai_client.py URL MODEL`; prints JSON."""

import asyncio
import json
import sys

import openai

URL, MODEL = sys.argv[1:]
TALK = [{"role": "user", "content": "How many clips?"}]


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/oai/api/v1", api_key="tml-local", max_retries=0)
    settings = {"model": MODEL, "max_tokens": 20, "seed": 5}
    whole = client.chat.completions.create(messages=TALK, logprobs=True, top_logprobs=2, n=2, **settings)
    stream = client.chat.completions.create(
        messages=TALK, n=2, stream=True, stream_options={"include_usage": True}, **settings
    )
    texts, usage = ["", ""], None

    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices], texts
    assert usage.completion_tokens == whole.usage.completion_tokens == 40, usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    content = whole.choices[0].logprobs.content
    assert len(content) == 20 and all(2 <= len(entry.top_logprobs) <= 3 for entry in content)

    completion = client.completions.create(prompt="Natalia", logprobs=1, echo=True, **settings)
    assert completion.choices[0].text.startswith("Natalia") and completion.choices[0].logprobs.token_logprobs[0] is None
    raw = client.completions.with_raw_response.create(prompt="Natalia", extra_body={"top_k": 5}, **settings)
    assert raw.parse().choices[0].finish_reason == "length"
    assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL

    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    for body, kind, code in (
        ({"model": "no-such-model", "messages": TALK}, openai.NotFoundError, "model_not_found"),
        ({"model": MODEL, "messages": TALK, "max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": MODEL, "messages": TALK, "tools": [tool], "tool_choice": "required"}, openai.BadRequestError, None),
    ):
        try:
            client.chat.completions.create(**body)
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"{body} was accepted")

    async def stream_chat() -> str:
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="tml-local")
        text = ""
        async with client.chat.completions.stream(messages=TALK, **settings) as stream:
            async for event in stream:
                text += event.delta if event.type == "content.delta" else ""
            final = stream.current_completion_snapshot
        assert final.choices[0].message.content == text
        return text

    assert asyncio.run(stream_chat()) == texts[0]
    print(json.dumps({"text": texts[0], "version": openai.__version__}))


main()
