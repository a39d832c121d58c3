"""Messages through the `anthropic` package: `python anthropic_client.py URL MODEL`; prints JSON."""

import json
import sys

import anthropic

URL, MODEL = sys.argv[1:]
TALK = [{"role": "user", "content": "How many clips?"}]


def main() -> None:
    client = anthropic.Anthropic(base_url=f"{URL}/anthropic/api", api_key="tml-local", max_retries=0)
    settings = {"model": MODEL, "max_tokens": 20, "extra_body": {"seed": 5}}
    whole = client.messages.create(messages=TALK, **settings)
    text = "".join(block.text for block in whole.content)
    with client.messages.stream(messages=TALK, **settings) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == text == "".join(block.text for block in final.content)
    assert final.stop_reason == whole.stop_reason == "max_tokens" and final.usage.output_tokens == 20

    counted = client.messages.count_tokens(model=MODEL, messages=TALK)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    try:
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "ha" * 10_000}])
    except anthropic.BadRequestError as error:
        assert "prompt is too long: " in str(error)
    else:
        raise AssertionError("a prompt that is too long was accepted")

    try:
        client.messages.create(model="no-such-model", max_tokens=5, messages=TALK)
    except anthropic.NotFoundError as error:
        assert "does not exist" in str(error)
    else:
        raise AssertionError("an unknown model was accepted")
    print(json.dumps({"text": text, "version": anthropic.__version__}))


main()
