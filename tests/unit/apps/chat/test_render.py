"""Rendered prompts have the same tokens as `AutoTokenizer.apply_chat_template`."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_tx.apps.chat.template import ChatTemplate
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings
from tests.support.tiny_tokenizer import PACKAGED

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = "gemma3", "llama3", "qwen2", "qwen3", "tiny"
TRIMMING = "gemma3", "llama3"
"""Model families whose templates strip whitespace around message content."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": 'Find a city\'s <weather> & "more" – ü',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "id": "call_1", "function": {"name": "find", "arguments": {"city": "Zürich", "n": [1, 2]}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|> there\n"},
    {"role": "assistant", "content": " Hello. ", "reasoning_content": "A greeting."},
    {"role": "user", "content": "What is 2 + 2?"},
]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "talk": (TALK, None),
    "tools": (TALK, TOOLS),
    "called": (
        [*TALK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4 °C"}],
        TOOLS,
    ),
}


def model_directory(tmp_path: Path, family: str) -> Path:
    """Write the tiny tokenizer with the template of a family, inside the configuration or as a file."""
    (tmp_path / "tokenizer.json").write_bytes((PACKAGED / "tokenizer.json").read_bytes())
    config = json.loads((PACKAGED / "tokenizer_config.json").read_text()) | {"bos_token": "<|endoftext|>"}
    if family == "tiny":
        (tmp_path / "chat_template.jinja").write_bytes((PACKAGED / "chat_template.jinja").read_bytes())
    else:
        config["chat_template"] = (TEMPLATES / f"{family}.jinja").read_text()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def make_text(directory: Path, **settings: Any) -> ModelText:
    return ModelText(ApiSettings(data_dir=directory, base_model=str(directory), **settings))


@pytest.mark.parametrize(
    ("family", "conversation"),
    [
        (family, conversation)
        for family in FAMILIES
        for conversation in CONVERSATIONS
        if (family, conversation) != ("gemma3", "called")  # the template rejects this
    ],
)
@pytest.mark.parametrize("more", [{}, {"enable_thinking": False}, {"date_string": "1 Nov 2026"}], ids=str)
def test_tokens_equal_those_of_transformers(
    tmp_path: Path, family: str, conversation: str, more: dict[str, object]
) -> None:
    messages, tools = CONVERSATIONS[conversation]
    directory = model_directory(tmp_path, family)
    reference = AutoTokenizer.from_pretrained(directory)
    text = make_text(directory)
    for adds in (True, False):
        expected = reference.apply_chat_template(
            messages, tools=tools, add_generation_prompt=adds, return_dict=False, **more
        )
        rendered = text.template.render(messages, tools, add_generation_prompt=adds, variables=more)
        assert text.encode(rendered, add_special=False) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["The answer", "The answer is "])
def test_final_message_can_be_continued(tmp_path: Path, family: str, content: str) -> None:
    directory = model_directory(tmp_path, family)
    messages = [*TALK, {"role": "assistant", "content": content}]
    reference = AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    rendered = make_text(directory).template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected and rendered.endswith(content.strip() if family in TRIMMING else content)


def test_refusal_of_a_template_names_the_messages(tmp_path: Path) -> None:
    template = make_text(model_directory(tmp_path, "llama3")).template
    with pytest.raises(UserError, match="no text that could be continued"):
        template.render([{"role": "assistant", "content": None}], continue_final_message=True)
    template = make_text(model_directory(tmp_path, "gemma3")).template
    with pytest.raises(UserError, match=r"messages: .*take turns, not tool"):
        template.render(CONVERSATIONS["called"][0])


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}", "{{ 1 / 0 }}"],
)
def test_template_runs_in_a_sandbox(source: str) -> None:
    with pytest.raises(UserError, match="chat template failed"):
        ChatTemplate({"default": source}, {}).render(TALK)


def test_malformed_template_is_reported() -> None:
    with pytest.raises(UserError, match="chat template is malformed"):
        ChatTemplate({"default": "{% if %}"}, {}).render(TALK)


def test_named_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "qwen2")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    template = make_text(directory).template
    assert (template.render(TALK), template.render(TALK, TOOLS)) == ("d", "t")


def test_template_of_the_settings_wins(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own")
    assert make_text(model_directory(tmp_path, "qwen3"), chat_template=file).template.render(TALK) == "own"


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        make_text(tmp_path).check()
    with pytest.raises(UserError, match="--chat-template"):
        _ = make_text(tmp_path).template
    with pytest.raises(UserError, match="cannot be read"):
        _ = make_text(tmp_path, chat_template=tmp_path / "missing").template


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    text = make_text(model_directory(tmp_path, "qwen2"))
    for sample in ("Zürich – 42 °C 🙂", "<|im_start|>user\n<think>"):
        tokens = text.encode(sample, add_special=False)
        assert b"".join(map(text.decode_bytes, tokens)).decode() == sample
    assert text.eos_token_id == text.tokenizer.token_to_id("<|im_end|>")
    assert text.decode_bytes(10**6) == b""
