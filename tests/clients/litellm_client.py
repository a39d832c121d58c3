"""Both endpoints through `litellm`: `python litellm_client.py URL MODEL`; prints JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

URL, MODEL = sys.argv[1:]
TALK = [{"role": "user", "content": "How many clips?"}]


def main() -> None:
    litellm.telemetry = False
    settings = {"api_key": "tml-local", "max_tokens": 20, "messages": TALK}
    openai = {"model": f"openai/{MODEL}", "api_base": f"{URL}/oai/api/v1", "seed": 5}
    whole = litellm.completion(**openai, **settings).choices[0].message.content
    chunks = litellm.completion(**openai, **settings, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

    anthropic = {"model": f"anthropic/{MODEL}", "api_base": f"{URL}/anthropic/api"}
    reply = litellm.completion(**anthropic, **settings, temperature=0)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 20
    chunks = litellm.completion(**anthropic, **settings, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.choices[0].message.content
    print(json.dumps({"text": whole}))


main()
