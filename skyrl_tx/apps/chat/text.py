"""Text of the served model: its tokenizer and chat template, loaded with the first request that needs them."""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from skyrl_tx.apps.chat import model_files
from skyrl_tx.apps.chat.render import ChatTemplate, special_tokens
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Decoder(Protocol):
    """Turns tokens into text, without special tokens if asked."""

    def text_of(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of tokens; incomplete UTF-8 becomes U+FFFD."""
        ...


class ModelText:
    """The tokenizer of the served model. Thread-safe; raises UserError if the model has no `tokenizer.json`."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._model = settings.tokenizer_id or settings.base_model
        self._loading = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer."""
        if self._tokenizer is None:
            with self._loading:
                if self._tokenizer is None:
                    self._tokenizer = self._load()
        return self._tokenizer

    def _load(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        path = model_files.find(self._model, model_files.TOKENIZER)
        if path is None:
            raise UserError(
                f"model {self._settings.public_model_name!r} has no {model_files.TOKENIZER}, which text needs: "
                "send token ids to completions with return_token_ids, or name a tokenizer with --tokenizer-id"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{model_files.TOKENIZER} of the model cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def check(self) -> None:
        """Raise UserError if there is no tokenizer."""
        _ = self.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether text is possible."""
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
                    self._template = ChatTemplate.load(self._model, self._settings.chat_template)
        return self._template

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text, by default with those that the tokenizer adds, such as a BOS token."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special).ids)

    def text_of(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of tokens; incomplete UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        table = model_files.byte_of_character()
        if self._is_byte_level and token not in self._added and all(character in table for character in piece):
            return bytes(table[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return self.text_of([token], skip_special=False).encode()

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a turn by the tokenizer's configuration; None if it names none."""
        name = special_tokens(model_files.read_config(self._model)).get("eos_token")
        return None if name is None else self.tokenizer.token_to_id(name)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in str(self.tokenizer.decoder)
