"""Structured outputs, forced calls and sampling controls through the packages `openai` and `anthropic`.

`python constraints_client.py URL MODEL` fails if a reply does not have the requested form.
"""

import json
import re
import sys
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:]
TALK: Any = [{"role": "user", "content": "How many clips?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
MAX_TOKENS = 100


class Find(BaseModel):
    """Find a thing."""

    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    count: Literal[1, 22, 333]


def check_openai() -> None:
    client = openai.OpenAI(base_url=f"{URL}/oai/api/v1", api_key="tml-local", max_retries=0)
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": TALK,
        "max_tokens": MAX_TOKENS,
        "seed": 5,
        "extra_body": NO_THINKING,
    }

    # A Pydantic model as the form of the reply, whole and streamed.
    parsed = client.chat.completions.parse(response_format=Find, **settings).choices[0].message.parsed
    assert isinstance(parsed, Find)
    with client.chat.completions.stream(response_format=Find, **settings) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    made = client.chat.completions.create(response_format={"type": "json_object"}, **settings)
    assert (made.choices[0].message.content or "").lstrip().startswith("{")

    # Forced calls, whole and streamed.
    tool = openai.pydantic_function_tool(Find, name="find")
    named: Any = {"type": "function", "function": {"name": "find"}}
    for choice in ("required", named):
        calling = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, **settings}
        made = client.chat.completions.parse(**calling)
        [call] = made.choices[0].message.tool_calls or []
        assert call.function.name == "find" and isinstance(call.function.parsed_arguments, Find)
        with client.chat.completions.stream(**calling) as stream:
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.parsed_arguments == call.function.parsed_arguments

    # vLLM's fields, and controls of sampling.
    def complete(structured: dict[str, Any], **more: Any) -> str:
        extra = {"structured_outputs": structured, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2}
        made = client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=40, seed=5, extra_body={**extra, **more}, **controls
        )
        return made.choices[0].text

    controls: Any = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": 2.0}}
    assert re.fullmatch("[ab]{3}-[0-9]{2}", complete({"regex": "[ab]{3}-[0-9]{2}"}))
    assert complete({"choice": ["perhaps", "never"]}) in ("perhaps", "never")
    assert re.fullmatch("x[0-9](,x[0-9])?", complete({"grammar": 'root ::= item ("," item)?\nitem ::= "x" [0-9]'}))

    # Errors name the field.
    for extra, field in (({"regex": "[a"}, "structured_outputs"), ({"choice": []}, "structured_outputs")):
        try:
            complete(extra)
        except openai.BadRequestError as error:
            assert str(error.param).startswith(field), error
        else:
            raise AssertionError(f"{extra} was accepted")


def check_anthropic() -> None:
    client = anthropic.Anthropic(base_url=f"{URL}/anthropic/api", api_key="tml-local", max_retries=0)
    settings: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": MAX_TOKENS, "extra_body": {"seed": 5}}
    tools: Any = [{"name": "find", "input_schema": Find.model_json_schema()}]

    # Forced calls, whole and streamed.
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "find"}):
        made = client.messages.create(tools=tools, tool_choice=choice, **settings)
        [block] = made.content
        assert made.stop_reason == "tool_use" and block.type == "tool_use"
        found = Find.model_validate(block.input)
        with client.messages.stream(tools=tools, tool_choice=choice, **settings) as stream:
            [streamed] = stream.get_final_message().content
        assert streamed.type == "tool_use" and Find.model_validate(streamed.input) == found

    # The form of the reply.
    form = {"format": {"type": "json_schema", "schema": Find.model_json_schema()}}
    made = client.messages.create(**{**settings, "extra_body": {"seed": 5, "output_config": form}})
    [block] = made.content
    assert block.type == "text"
    Find.model_validate(json.loads(block.text))


check_openai()
check_anthropic()
