"""Checks of the model's text: its tokenizer and its chat template."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.contract.errors import UserError
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning

_MESSAGES: tuple[Mapping[str, object], ...] = ({"role": "user", "content": "Hello"},)
_TOOLS: tuple[Mapping[str, object], ...] = (
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
)


def check_text(subject: ExaminedServer) -> Iterator[Finding]:
    """Check that text can be encoded, decoded and rendered as a chat."""
    settings = subject.settings.make_api_settings()
    if not _is_local(settings.tokenizer_id or settings.base_model):
        yield ok("tokenizer", "not examined: the files of the model are not here yet")
        return
    text = ModelText(settings)
    try:
        encoded = text.encode("Hello", add_special=False)
        decoded = text.decode(encoded, skip_special=True)
    except UserError as problem:
        yield warning("tokenizer", str(problem), "stop strings and the OpenAI and Anthropic endpoints need it")
        return
    if decoded.strip() != "Hello":
        advice = "compare its files with those of the model"
        yield warning("tokenizer", f"it decodes its tokens of 'Hello' as {decoded!r}", advice)
    else:
        yield ok("tokenizer", f"tokenizer.json with {text.tokenizer.get_vocab_size()} tokens")
    if text.eos_token_id is None:
        yield warning(
            "tokenizer",
            "tokenizer_config.json names no eos_token among the tokens",
            "chat completions end at the model's own end tokens only: compare the file with the model's",
        )
    yield from _check_template(text, is_given=settings.chat_template is not None)


def _is_local(model: str) -> bool:
    """Whether a model is a directory, or in the cache of the hub."""
    if Path(model).expanduser().is_dir() or model.count("/") != 1:
        return True
    from huggingface_hub import try_to_load_from_cache  # takes half a second

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _check_template(text: ModelText, *, is_given: bool) -> Iterator[Finding]:
    what = "--chat-template" if is_given else "the model's chat template"
    try:
        prompt = text.template.render(_MESSAGES)
    except UserError as problem:
        finding = error if is_given else warning
        yield finding("template", str(problem), "give a template with --chat-template; training does not need one")
        return
    try:
        has_tools = text.template.render(_MESSAGES, _TOOLS) != prompt
    except UserError:
        has_tools = False
    yield ok("template", f"{what} renders messages{' and tools' if has_tools else ', and ignores tools'}")
