"""Rendered prompts have the same tokens as `AutoTokenizer.apply_chat_template`."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from skyrl_tx.apps.chat.logprobs import CompletionLogprobs, Echo, TokenLogprob
from skyrl_tx.apps.chat.template import ChatTemplate
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.errors import ServerError, UserError
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
    with pytest.raises(ServerError, match="chat template is malformed: line 1: Expected an expression"):
        ChatTemplate({"default": "{% if %}"}, {}).render(TALK)


NEW = "<|new|>"
"""A token that is not in the tiny vocabulary."""
FIELDS: dict[str, Any] = {"lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "configuration": {"tokenizer_config.json": {"bos_token": NEW, "eos_token": "<|im_end|>"}},
    "objects": {"tokenizer_config.json": {"bos_token": {"__type": "AddedToken", "content": NEW, **FIELDS}}},
    "older file": {"tokenizer_config.json": {}, "special_tokens_map.json": {"bos_token": NEW}},
    "objects of an older file": {"special_tokens_map.json": {"bos_token": {"content": NEW, **FIELDS}}},
    "both": {"tokenizer_config.json": {"bos_token": "<|im_end|>"}, "special_tokens_map.json": {"bos_token": NEW}},
    "list wins over the older file": {
        "tokenizer_config.json": {
            "bos_token": "<|im_end|>",
            "added_tokens_decoder": {
                "7": {"content": "Hi", **FIELDS, "special": False},
                "1024": {"content": NEW, **FIELDS, "special": True},
            },
        },
        "special_tokens_map.json": {"bos_token": NEW},
        "added_tokens.json": {"Be": 5},
    },
    "older list of tokens": {"tokenizer_config.json": {"bos_token": NEW}, "added_tokens.json": {"Hi": 1025, NEW: 1024}},
    "named in addition": {
        "tokenizer_config.json": {"bos_token": None, "image_token": NEW, "extra_special_tokens": {"boi_token": "Be"}}
    },
    "listed in addition": {"tokenizer_config.json": {"additional_special_tokens": [NEW, "Hi"]}},
    "split": {"tokenizer_config.json": {"bos_token": NEW, "split_special_tokens": True}},
}
SOURCE = (
    "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ boi_token }}{% for message in messages %}"
    "{{ message.content }} <|new|> {% endfor %}"
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_special_tokens_are_those_of_transformers(tmp_path: Path, layout: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((PACKAGED / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    for name, content in LAYOUTS[layout].items():
        if name == "tokenizer_config.json":
            content = {"tokenizer_class": "PreTrainedTokenizerFast", **content}
        (tmp_path / name).write_text(json.dumps(content))

    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = make_text(tmp_path)
    rendered = text.template.render(TALK, add_generation_prompt=False)
    assert rendered == reference.apply_chat_template(TALK, tokenize=False)
    assert text.encode(rendered, add_special=False) == reference.apply_chat_template(TALK, return_dict=False)
    assert text.eos_token_id == reference.eos_token_id


def test_template_files_replace_those_of_the_configuration(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "qwen2")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (directory / "chat_template.jinja").write_text("d")
    template, reference = make_text(directory).template, AutoTokenizer.from_pretrained(directory)
    for tools, expected in ((None, "d"), (TOOLS, "t")):
        assert template.render(TALK, tools) == expected
        assert reference.apply_chat_template(TALK, tools=tools, tokenize=False) == expected


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
    with pytest.raises(ServerError, match="missing: No such file or directory"):
        _ = make_text(tmp_path, chat_template=tmp_path / "missing").template
    (tmp_path / "broken").write_text("{% if %}")
    with pytest.raises(ServerError, match="broken: the chat template is malformed"):
        _ = make_text(tmp_path, chat_template=tmp_path / "broken").template


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    text = make_text(model_directory(tmp_path, "qwen2"))
    for sample in ("Zürich – 42 °C 🙂", "<|im_start|>user\n<think>"):
        tokens = text.encode(sample, add_special=False)
        assert b"".join(map(text.decode_bytes, tokens)).decode() == sample
    assert text.eos_token_id == text.tokenizer.token_to_id("<|im_end|>")
    assert text.decode_bytes(10**6) == b""


def test_encoding_releases_the_interpreter_lock(tmp_path: Path) -> None:
    text = make_text(model_directory(tmp_path, "qwen2"))
    num_turns, is_over, interval = 0, threading.Event(), sys.getswitchinterval()

    def take_turns() -> None:
        nonlocal num_turns
        while not is_over.is_set():
            num_turns += 1
            time.sleep(0)

    other = threading.Thread(target=take_turns)
    text.check()
    sys.setswitchinterval(60.0)  # this thread keeps the lock unless it releases it
    try:
        other.start()
        before = num_turns
        tokens = text.encode("How many clips? " * 20_000, add_special=False)
        during = num_turns - before
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        other.join()
    assert len(tokens) > 20_000 and during > 10


def test_shortest_encoding_is_known_before_encoding(tmp_path: Path) -> None:
    text = make_text(model_directory(tmp_path, "qwen2"))
    longest = max(text.tokenizer.get_vocab(), key=len)
    for sample in ("", longest * 10, "Zürich – 42 °C 🙂" * 10, "How many clips?"):
        assert text.count_min_tokens(sample) <= len(text.encode(sample, add_special=False))
    assert text.count_min_tokens(longest * 10) == 10


@pytest.mark.parametrize("skip_special", [False, True])
def test_text_offset_is_where_a_token_begins(tmp_path: Path, skip_special: bool) -> None:
    text = make_text(model_directory(tmp_path, "qwen2"))
    echo, sampled = "Zürich 🙂", "é – 42 🙂<|im_end|> ok"
    prompt = [text.tokenizer.token_to_id("<|endoftext|>"), *text.encode(echo, add_special=False)]
    tokens = text.encode(sampled, add_special=False)
    hidden = text.find_hidden_tokens() if skip_special else frozenset[int]()
    described = CompletionLogprobs(text, hidden).describe(
        [[TokenLogprob(token, -1.0, [(token, -1.0)]) for token in tokens]],
        Echo(echo, prompt, [[TokenLogprob(token, None, ()) for token in prompt]]),
    )

    offsets = json.loads(bytes(cast(Any, described["text_offset"])))
    expected = [0, *(whole_length(text, prompt[1:end]) for end in range(1, len(prompt)))]
    expected += [len(echo) + whole_length(text, tokens[:end], skip_special=skip_special) for end in range(len(tokens))]
    assert offsets == expected and len(set(offsets)) < len(offsets), "some tokens are parts of a character"
    assert json.loads(bytes(cast(Any, described["token_logprobs"]))) == [None] * len(prompt) + [-1.0] * len(tokens)


def whole_length(text: ModelText, tokens: list[int], *, skip_special: bool = False) -> int:
    """Return the number of complete characters of tokens."""
    return len(text.tokenizer.decode(tokens, skip_special_tokens=skip_special).rstrip("\ufffd"))
