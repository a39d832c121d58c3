"""Every form of message that the APIs accept gives the prompt of `apply_chat_template`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_tx.apps.chat import prompts, schemas
from skyrl_tx.apps.chat.template import ChatTemplate
from skyrl_tx.contract.errors import FieldError, UserError
from tests.support.tiny_tokenizer import PACKAGED

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = "deepseek", "gemma3", "llama3", "qwen2", "qwen3", "qwen3_5", "tiny"
READS_PARTS = ("qwen3_5",)
ONE_SYSTEM = ("llama3", "qwen3_5")
"""Families whose templates demand that only the first message is of the system."""
TAKES_TURNS = ("gemma3",)
"""Families whose templates demand that the user and the assistant take turns."""
Messages = list[dict[str, Any]]

SENT = '{"city":"Zürich", "days": 2}'
"""The arguments as the client wrote them."""
SYSTEM, LATER = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
USER, AGAIN = {"role": "user", "content": "Hi!"}, {"role": "user", "content": "Are you there?"}
REPLY = {"role": "assistant", "content": "Hello."}
PARTS: Any = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
TOOL: dict[str, Any] = {
    "function": {"parameters": {"type": "object"}, "strict": True, "name": "find", "description": None},
    "type": "function",
}
CALLS: Any = [{"id": "call_1", "type": "function", "function": {"name": "find", "arguments": SENT}}]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4 °C"}

OPENAI: dict[str, Messages] = {
    "texts": [SYSTEM, USER, REPLY, AGAIN],
    "parts": [SYSTEM | {"content": PARTS}, USER | {"content": PARTS}, REPLY | {"content": PARTS}, AGAIN],
    "calls": [USER, CALLED, RESULT],
    "calls with text": [USER, CALLED | {"content": "Wait."}, RESULT | {"content": PARTS}, REPLY, AGAIN],
    "developer": [SYSTEM | {"role": "developer"}, USER],
    "several system messages": [SYSTEM, LATER | {"content": PARTS}, USER],
    "later system message": [USER, REPLY, LATER, AGAIN],
    "first and later system message": [SYSTEM | {"role": "developer"}, USER, REPLY, LATER, AGAIN],
    "consecutive messages": [USER, AGAIN, REPLY],
}


def find_source(family: str) -> str:
    path = PACKAGED / "chat_template.jinja" if family == "tiny" else TEMPLATES / f"{family}.jinja"
    return path.read_text()


def render(family: str, messages: Messages, tools: list[dict[str, Any]], **options: Any) -> str:
    """Render the messages of an OpenAI request."""
    body = {"model": "tiny", "messages": messages, "tools": tools}
    request = schemas.ChatCompletionRequest.model_validate(body)
    converted = [prompts.convert_openai_message(message, "messages[0]") for message in request.messages]
    template = ChatTemplate({"default": find_source(family)}, {"bos_token": "<s>"})
    return template.render(converted, [tool.original for tool in request.tools or []], **options)


def read_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects, as templates expect them."""
    if "tool_calls" not in message:
        return message
    (call,) = message["tool_calls"]
    function = call["function"] | {"arguments": json.loads(call["function"]["arguments"])}
    return message | {"tool_calls": [call | {"function": function}]}


def join_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return message | {"content": "\n".join(texts)}


def find_reference(family: str, name: str, messages: Messages) -> Messages:
    """Return the messages for `apply_chat_template`, in a form that the template of the family accepts."""
    found = [message | {"role": message["role"].replace("developer", "system")} for message in messages]
    if family != "deepseek":
        found = [read_arguments(message) for message in found]
    if family not in READS_PARTS:
        found = [join_parts(message) for message in found]
    if "system message" in name and family in (*ONE_SYSTEM, *TAKES_TURNS):
        systems = [join_parts(message)["content"] for message in found if message["role"] == "system"]
        others = [message for message in found if message["role"] != "system"]
        found = [{"role": "system", "content": "\n\n".join(systems)}, *others]
    if name == "consecutive messages" and family in TAKES_TURNS:
        found = [{"role": "user", "content": "Hi!\n\nAre you there?"}, REPLY]
    return found


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(PACKAGED, bos_token="<s>")


@pytest.mark.parametrize("family", FAMILIES)
def test_openai_messages_render_as_in_transformers(reference: Any, family: str) -> None:
    wrong: dict[str, tuple[str, str]] = {}
    for name, messages in OPENAI.items():
        if family in TAKES_TURNS and "calls" in name:
            continue

        tools = [TOOL] if "calls" in name else []
        expected = reference.apply_chat_template(
            find_reference(family, name, messages),
            tools=tools or None,
            chat_template=find_source(family),
            add_generation_prompt=True,
            tokenize=False,
        )

        rendered = render(family, messages, tools)
        if rendered != expected:
            wrong[name] = rendered, expected
    assert wrong == {}


def test_anthropic_messages_render_like_those_of_openai() -> None:
    arguments = json.loads(SENT)
    call = {"type": "tool_use", "id": "call_1", "name": "find", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "4 °C"}
    blocks = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    messages = [SYSTEM, USER | {"content": PARTS}, *blocks, LATER, AGAIN]
    body = {"model": "tiny", "system": PARTS, "messages": messages}

    request = schemas.CountTokensRequest.model_validate(body)
    converted = prompts.convert_anthropic_messages(request.system, request.messages)
    calls = [CALLS[0] | {"function": {"name": "find", "arguments": json.dumps(arguments, ensure_ascii=False)}}]
    openai = [SYSTEM | {"content": PARTS}, SYSTEM, USER | {"content": PARTS}, CALLED | {"tool_calls": calls}, RESULT]

    for family in set(FAMILIES) - {"gemma3"}:
        rendered = ChatTemplate({"default": find_source(family)}, {"bos_token": "<s>"}).render(converted)
        assert rendered == render(family, [*openai, LATER, AGAIN], []), family


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])
def test_last_message_of_parts_can_be_continued(family: str) -> None:
    messages = [USER, REPLY | {"content": PARTS}]
    rendered = render(family, messages, [], add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nOne.Two." if family == "qwen3_5" else "One.\nTwo.")


def test_text_is_wrapped_for_a_template_that_reads_only_parts() -> None:
    source = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": source}, {}).render([USER, REPLY | {"content": PARTS}]) == "Hi!One.Two."


def test_template_that_fails_for_every_form_is_reported_once() -> None:
    source = "{{ raise_exception('no ' ~ messages|length) }}"
    with pytest.raises(FieldError, match="failed with: no 3") as caught:
        ChatTemplate({"default": source}, {}).render([USER, AGAIN, SYSTEM])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "arguments",
    ['{"a": ' + "[" * 3000, '{"a": ' + "[" * 3000 + "]" * 3000 + "}", '{"a": NaN}', '{"a": "\\ud83d"}', "[]", "{"],
    ids=["brackets", "nested", "nan", "surrogate", "list", "cut"],
)
def test_arguments_that_are_no_json_object_are_refused_by_name(arguments: str) -> None:
    function = schemas.FunctionCall(name="find", arguments=arguments)
    message = schemas.ChatMessage(role="assistant", tool_calls=[schemas.MessageToolCall(function=function)])
    with pytest.raises(FieldError) as caught:
        prompts.convert_openai_message(message, "messages[2]")
    assert caught.value.field == "messages[2].tool_calls[0].function.arguments"


def test_reasoning_is_turned_off_under_every_name_of_the_variable() -> None:
    template = ChatTemplate({"default": "{{ enable_thinking }} {{ thinking }} {{ messages[0].content }}"}, {})
    text = SimpleNamespace(check=lambda: None, template=template)
    context = SimpleNamespace(settings=SimpleNamespace(tool_parser="auto"))
    service: Any = SimpleNamespace(text=text, context=context, response_template=None, encode=lambda *_, **__: [])
    for variables, rendered in (
        ({"enable_thinking": False}, "False False Hi!"),
        ({"enable_thinking": True, "thinking": False}, "True False Hi!"),
        ({}, "  Hi!"),
    ):
        assert prompts.render_prompt(service, [USER], [], variables=variables).text == rendered


def test_contradicting_variables_are_refused() -> None:
    assert prompts.read_variables(None, [("enable_thinking", "enable_thinking", False)]) == {"enable_thinking": False}
    assert prompts.read_variables({"a": 1}, [("enable_thinking", "enable_thinking", None)]) == {"a": 1}
    with pytest.raises(UserError, match="enable_thinking: sets enable_thinking"):
        prompts.read_variables({"enable_thinking": True}, [("enable_thinking", "enable_thinking", False)])
