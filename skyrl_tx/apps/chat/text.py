"""Load the tokenizer and chat template of the served model, and turn sampled tokens into text."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from skyrl_tx.apps.chat.template import ChatTemplate
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 4
"""A decoder writes at most this many U+FFFD for the bytes of one incomplete character."""
_MAX_HELD = 64
"""A text that ends with more U+FFFD than this has invalid bytes.

With fewer, the bytes may still become valid: a byte-fallback decoder writes U+FFFD for multiple
adjacent characters until the last character is complete.
"""
_NUM_KEPT = 16
"""After invalid bytes, this many tokens stay in the window, because they may begin a character."""


def _find_file(model: str, name: str) -> Path | None:
    """Find a file of a model. `model` is a directory or a Hugging Face id.

    Returns None if there is no such file.

    A file from the hub is read from the local cache, where the backend put the model. It is
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


def _read_config(model: str) -> dict[str, object]:
    """Return the content of `tokenizer_config.json`, empty if there is none.

    Raises UserError if it is malformed.
    """
    path = _find_file(model, _CONFIG)
    if path is None:
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"the model's {_CONFIG} is not valid JSON: {error}") from error
    return cast(dict[str, object], content) if isinstance(content, dict) else {}


@cache
def _map_characters_to_bytes() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents.

    Printable bytes represent themselves. The other bytes are numbered from U+0100 (Radford et al.
    2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


def _read_special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens by the names that chat templates use, for example "eos_token"."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = cast(Mapping[str, object], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


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


def _load_template(model: str, file: Path | None) -> ChatTemplate:
    """Load the chat template from `file`, or from the model's files if `file` is None.

    Raises UserError if there is no template, or if it cannot be read.
    """
    config = _read_config(model)
    path = file or _find_file(model, _TEMPLATE)
    if path is not None:
        try:
            return ChatTemplate({"default": path.read_text(encoding="utf-8")}, _read_special_tokens(config))
        except (OSError, ValueError) as error:
            raise UserError(f"the chat template {path} cannot be read: {error}") from error

    sources = _read_templates(config.get("chat_template"))
    if "default" not in sources:
        raise UserError(
            "this model has no chat template; use completions instead of chat, or ask the operator to start the server "
            "with --chat-template"
        )
    return ChatTemplate(sources, _read_special_tokens(config))


class Decoder(Protocol):
    """Turns tokens into text."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of tokens. Incomplete UTF-8 becomes U+FFFD.

        `skip_special` leaves out special tokens.
        """
        ...


class ModelText:
    """The tokenizer and chat template of the served model, loaded on first use. Thread-safe.

    Methods raise UserError if the model has no `tokenizer.json`.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._model = settings.tokenizer_id or settings.base_model
        self._loading = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer. Raises UserError if the model has none."""
        if self._tokenizer is None:
            with self._loading:
                if self._tokenizer is None:
                    self._tokenizer = self._load()
        return self._tokenizer

    def _load(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        path = _find_file(self._model, _TOKENIZER)
        if path is None:
            raise UserError(
                f"model {self._settings.public_model_name!r} has no {_TOKENIZER}, so the server cannot convert text: "
                "send token ids to the completions endpoint with return_token_ids, or ask the operator to start the "
                "server with --tokenizer-id"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"the model's {_TOKENIZER} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def check(self) -> None:
        """Raise UserError if the model has no tokenizer."""
        _ = self.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer that can be loaded."""
        try:
            self.check()
        except UserError:
            return False
        return True

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises UserError if there is none."""
        if self._template is None:
            with self._loading:
                if self._template is None:
                    self._template = _load_template(self._model, self._settings.chat_template)
        return self._template

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Encode a text.

        `add_special` adds the tokenizer's special tokens, for example a BOS token.
        """
        return list(self.tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of tokens. Incomplete UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def decode_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token. They may be an incomplete character."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        table = _map_characters_to_bytes()
        if (
            self._is_byte_level
            and token not in self._extra_token_ids
            and all(character in table for character in piece)
        ):
            return bytes(table[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return self.decode([token], skip_special=False).encode()

    @cached_property
    def eos_token_id(self) -> int | None:
        """The EOS token in the tokenizer's configuration, or None."""
        name = _read_special_tokens(_read_config(self._model)).get("eos_token")
        return None if name is None else self.tokenizer.token_to_id(name)

    @cached_property
    def _extra_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self.tokenizer.decoder)


class Detokenizer:
    """Turns the tokens of a running sample into text, in pieces of complete characters.

    The joined pieces are equal to the text of all tokens decoded at once, if the decoder's output
    for a complete character does not depend on later tokens. This is the case, for example, for
    byte-level tokenizers.

    We do not use `tokenizers.decoders.DecodeStream`. With a byte-fallback vocabulary (Llama 2,
    Gemma), it raises "Invalid prefix" when a model samples an invalid byte, and it cannot return an
    incomplete last character.
    """

    def __init__(self, decoder: Decoder, *, skip_special: bool = True) -> None:
        self._decoder = decoder
        self._skip_special = skip_special
        self._window: list[int] = []
        """Tokens that are decoded together with the next tokens.

        Context is needed because a decoder may drop a space at the beginning of a text.
        """
        self._num_context = 0
        """Number of tokens at the beginning of the window whose text is complete."""
        self._num_released = 0
        """Number of characters of the window's text that were returned."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the new text that no later token can change."""
        if not tokens:
            return ""

        # Hold back U+FFFD at the end, unless the bytes are certainly invalid
        self._window.extend(tokens)
        text = self._decode(self._window)
        num_held = len(text) - len(text.rstrip(_INCOMPLETE))
        is_invalid = num_held > _MAX_HELD
        if is_invalid:
            num_held = _MAX_INCOMPLETE
        end = max(len(text) - num_held, self._num_released)
        piece = text[self._num_released : end]

        # Drop tokens whose text is complete, except for the context of the next tokens
        if num_held == 0:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_released = len(self._decode(self._window))
        elif is_invalid:
            self._window = self._window[-_NUM_KEPT:]
            self._num_context = 0
            self._num_released = len(self._decode(self._window)) - num_held
        else:
            self._num_released = end
        return piece

    def finish(self) -> str:
        """Return the rest of the text. Its last character may be incomplete."""
        text = self._decode(self._window)
        piece = text[self._num_released :]
        self._num_released = len(text)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(tokens, skip_special=self._skip_special)


def count_possible_start(text: str, tags: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of the tags.

    For example, the result for "a <tool" and the tag "<tool_call>" is 5.
    """
    longest = min(len(text), max(map(len, tags)) - 1)
    sizes = range(longest, 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags)), 0)


class StopStrings:
    """Ends a text that arrives in parts at the first match of a stop string."""

    def __init__(self, stops: Sequence[str], *, keep_match: bool = False) -> None:
        """With `keep_match`, the text includes the stop string."""
        self._stops = [stop for stop in stops if stop]
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, or None."""

    def feed(self, text: str) -> str:
        """Add text and return the text that is certainly not part of a stop string.

        Returns "" after a match.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text

        # The match that ends first wins, as in the engine
        self._held += text
        starts = [(self._held.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if matches:
            end, start, self.matched = min(matches)
            released, self._held = self._held[: end if self._keep_match else start], ""
            return released

        # Hold back what may be the beginning of a stop string
        keep = count_possible_start(self._held, self._stops)
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return released

    def finish(self) -> str:
        """Return the text that was held back, because no more text follows."""
        released, self._held = self._held, ""
        return released


class SampleText:
    """Turns the tokens of a running sample into text that ends at a stop string or stop token."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        stops: Sequence[str],
        stop_tokens: frozenset[int],
        keep_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """With `keep_stop`, the text includes the stop string or token that ended the sample."""
        self._detokenizer = Detokenizer(decoder, skip_special=skip_special)
        self._stops = StopStrings(stops, keep_match=keep_stop)
        self._stop_tokens = frozenset[int]() if keep_stop else stop_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the new text."""
        # Only the last token of a sample can be a stop token
        if tokens and tokens[-1] in self._stop_tokens:
            tokens = tokens[:-1]
        return self._stops.feed(self._detokenizer.feed(tokens))

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
