"""Read the files of a tokenizer as transformers does: its tokens, special tokens and chat templates.

The directory of a model can name a special token in `tokenizer.json`, `tokenizer_config.json`,
`special_tokens_map.json` and `added_tokens.json`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyrl_tx.apps.chat.template import ChatTemplate, read_checked_template, read_template
from skyrl_tx.contract.errors import UserError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATE_DIRECTORY = "additional_chat_templates"
_STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FIELDS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
"""Fields of a token that is written as an object."""


def find_file(model: str, name: str) -> Path | None:
    """Find a file of a model, or return None. `model` is a directory or a Hugging Face id.

    A file from the hub is read from the local cache, where the backend put the model. The file is
    downloaded only if the cache does not have the model.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        path = directory / name
        return path if path.is_file() else None
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        return None
    return _find_in_hub(model, name)


def _find_in_hub(model: str, name: str) -> Path | None:
    # Imported here because the import takes half a second
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(model, name)
    if isinstance(cached, str):
        return Path(cached)
    # The backend downloads all files of a model, so a file that is missing in the cache does not
    # exist
    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return None
    try:
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError, HfHubHTTPError):
        return None


def _read_json(model: str, name: str) -> dict[str, object]:
    """Return the content of a JSON file, empty if there is none. Raises UserError if it is malformed."""
    path = find_file(model, name)
    if path is None:
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"the model's {name} is not valid JSON: {error}") from error
    return cast(dict[str, object], content) if isinstance(content, dict) else {}


class TokenizerFiles:
    """The configuration of a tokenizer, from all files of its directory."""

    def __init__(self, model: str) -> None:
        """Read the files. `model` is a directory or a Hugging Face id.

        Raises UserError if a file is malformed.
        """
        self._model = model
        self.num_stored_tokens = 0
        """The vocabulary of `tokenizer.json`, without tokens that other files add; set by `load_tokenizer`."""
        self._config = _read_json(model, _CONFIG)
        # transformers reads the two older files only if the configuration has no list of tokens
        self._is_complete = "added_tokens_decoder" in self._config
        if not self._is_complete:
            self._config |= _read_json(model, _SPECIAL_TOKENS)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by the names that chat templates use, for example "eos_token"."""
        return {name: text for name, value in self._list_named().items() if (text := _read_text(value)) is not None}

    @property
    def response_template(self) -> object:
        """The description of the model's messages for `parse_response` of transformers, or None."""
        return self._config.get("response_template")

    def _list_named(self) -> dict[str, object]:
        """Return the fields that may name a special token, the fields with standard names first."""
        others = [name for name in self._config if name.endswith("_token") and name not in _STANDARD_NAMES]
        named = {name: self._config.get(name) for name in (*_STANDARD_NAMES, *others)}
        extra = self._config.get("extra_special_tokens")
        return named | cast(dict[str, object], extra) if isinstance(extra, dict) else named

    def load_tokenizer(self) -> "Tokenizer | None":
        """Load the tokenizer, or return None if there is no `tokenizer.json`.

        Raises UserError if the file is malformed.
        """
        from tokenizers import Tokenizer

        path = find_file(self._model, TOKENIZER)
        if path is None:
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
            self.num_stored_tokens = tokenizer.get_vocab_size()
            known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
            new = [token for token in self._iterate_added_tokens(tokenizer) if repr(token) not in known]
            tokenizer.add_tokens(new)
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"the model's {TOKENIZER} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = self._config.get("split_special_tokens") is True
        return tokenizer

    def _iterate_added_tokens(self, tokenizer: "Tokenizer") -> Iterator["AddedToken"]:
        """Yield the tokens that other files than `tokenizer.json` add to the vocabulary."""
        from tokenizers import AddedToken

        def make(fields: object, *, special: bool) -> AddedToken:
            values = cast(Mapping[str, Any], fields) if isinstance(fields, dict) else {"content": fields}
            arguments: dict[str, Any] = {"special": special}
            arguments |= {name: values[name] for name in values if name in _FIELDS}
            return AddedToken(**arguments)

        extra = self._config.get("extra_special_tokens")
        listed = extra if isinstance(extra, list) and extra else self._config.get("additional_special_tokens")
        values = [*self._list_named().values(), *cast(list[object], listed if isinstance(listed, list) else [])]
        special = {text: value for value in values if (text := _read_text(value)) is not None}

        # Tokens with their ids
        seen = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        decoder = cast(Mapping[str, Mapping[str, object]], self._config.get("added_tokens_decoder") or {})
        for _, fields in sorted((int(token), fields) for token, fields in decoder.items()):
            seen.add(str(fields["content"]))
            yield make(fields, special=str(fields["content"]) in special)
        older = {} if self._is_complete else cast(dict[str, int], _read_json(self._model, _ADDED_TOKENS))
        for text in sorted(older, key=older.__getitem__):
            if text not in seen:
                seen.add(text)
                yield AddedToken(text, normalized=text not in special, special=text in special)

        # Special tokens that no file lists with an id
        for text, value in special.items():
            if text not in seen:
                yield make(value, special=True)

    def load_template(self, file: Path | None) -> ChatTemplate:
        """Load the chat templates from `file`, or from the model's files if `file` is None.

        Raises UserError if there is no template, and ServerError if one cannot be read, or if the
        template in `file` is malformed.
        """
        if file is not None:
            return ChatTemplate({"default": read_checked_template(file)}, self.special_tokens)

        read = {name: read_template(path) for name, path in self._find_templates().items()}
        read = read or _read_templates(self._config.get("chat_template"))
        if "default" not in read:
            raise UserError(
                "this model has no chat template; use completions instead of chat, or ask the operator to start the "
                "server with --chat-template"
            )
        return ChatTemplate(read, self.special_tokens)

    def _find_templates(self) -> dict[str, Path]:
        """Return the template files by name. They replace the templates in the configuration."""
        found: dict[str, Path] = {}
        if (default := find_file(self._model, _TEMPLATE)) is not None:
            found["default"] = default
        beside = default or find_file(self._model, TOKENIZER) or find_file(self._model, _CONFIG)
        if beside is not None:
            found |= {path.stem: path for path in sorted((beside.parent / _TEMPLATE_DIRECTORY).glob("*.jinja"))}
        return found


def _read_text(value: object) -> str | None:
    """Return the text of a special token, which files write as a text or as an object."""
    text = cast(Mapping[str, object], value).get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_templates(value: object) -> dict[str, str]:
    """Return the chat templates of a tokenizer's configuration by name.

    The configuration has either one template, returned as "default", or a list of templates with
    names.
    """
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        return {}
    named = [cast(Mapping[str, object], item) for item in cast(list[object], value) if isinstance(item, dict)]
    return {str(item["name"]): str(item["template"]) for item in named if {"name", "template"} <= item.keys()}
