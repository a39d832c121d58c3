"""Load the tokenizer and chat template of the served model, and turn sampled tokens into text."""

import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

from skyrl_tx.apps.chat.template import ChatTemplate
from skyrl_tx.apps.chat.tokenizer_files import TOKENIZER, TokenizerFiles
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.settings import ApiSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


@cache
def _map_characters_to_bytes() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents.

    Printable bytes represent themselves. The other bytes are numbered from U+0100 (Radford et al.
    2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


class ContextTooLong(UserError):
    """The prompt alone, or with the requested new tokens, does not fit into the model's context."""

    def __init__(self, num_prompt: int, max_tokens: int | None, limit: int, *, is_minimum: bool = False) -> None:
        """With `is_minimum`, the prompt has at least `num_prompt` tokens."""
        requested = "" if max_tokens is None else f" and the request asks for {max_tokens} new tokens"
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but the prompt has "
            f"{'at least ' if is_minimum else ''}{num_prompt} tokens{requested}; shorten the prompt"
            + ("" if max_tokens is None else " or ask for fewer tokens")
        )
        self.num_prompt = num_prompt
        self.limit = limit


Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, including special tokens. Incomplete UTF-8 becomes U+FFFD."""


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
        self._hidden: dict[frozenset[str], frozenset[int]] = {}

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer. Raises UserError if the model has none."""
        # The event loop decodes streams and must not wait while a template is loaded, so without the lock first
        if self._tokenizer is None:
            with self._loading:
                if self._tokenizer is None:
                    self._tokenizer = self._load()
        return self._tokenizer

    def _load(self) -> "Tokenizer":
        tokenizer = self._files.load_tokenizer()
        if tokenizer is None:
            raise UserError(
                f"model {self._settings.public_model_name!r} has no {TOKENIZER}, so the server cannot convert text: "
                "send token ids to the completions endpoint with return_token_ids, or ask the operator to start the "
                "server with --tokenizer-id"
            )
        return tokenizer

    @cached_property
    def _files(self) -> TokenizerFiles:
        return TokenizerFiles(self._model)

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
        """The chat template. Raises UserError if there is none, and ServerError if it cannot be read."""
        if self._template is None:
            with self._loading:
                if self._template is None:
                    self._template = self._files.load_template(self._settings.chat_template)
        return self._template

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Encode a text.

        `add_special` adds the tokenizer's special tokens, for example a BOS token.
        """
        # Only the methods for batches release the interpreter lock
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def count_min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, from the length of the longest token."""
        return -(-len(text.encode()) // self._max_token_bytes)

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(len(piece.encode()) for piece in self.tokenizer.get_vocab())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens. Incomplete UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def decode_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token. The bytes may be a part of a character."""
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
        return self.decode([token]).encode()

    @cached_property
    def eos_token_id(self) -> int | None:
        """The EOS token in the tokenizer's configuration, or None if there is none.

        A token that is not in `tokenizer.json` does not count, because the model cannot draw it.
        """
        if not self.has_tokenizer:
            return None
        name = self._files.special_tokens.get("eos_token")
        token = None if name is None else self.tokenizer.token_to_id(name)
        return token if token is not None and token < self._files.num_stored_tokens else None

    @property
    def response_template(self) -> object:
        """The description of the model's messages in the form of transformers, or None."""
        return self._files.response_template

    def find_hidden_tokens(self, delimiters: Collection[str] = ()) -> frozenset[int]:
        """Return the special tokens that are left out of a text: all that are no delimiters.

        All requests of a format share one set, because a model may have thousands of special tokens.
        """
        kept = frozenset(delimiters)
        if kept not in self._hidden:
            self._hidden[kept] = frozenset(token for text, token in self.special_tokens.items() if text not in kept)
        return self._hidden[kept]

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of all special tokens by their texts."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

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

    def __init__(self, decode: Decode, hidden: frozenset[int] = frozenset()) -> None:
        """The tokens in `hidden` are left out of the text."""
        self._decode = decode
        self._hidden = hidden
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
        shown = [token for token in tokens if token not in self._hidden] if self._hidden else tokens
        if not shown:
            return ""

        # Hold back U+FFFD at the end, unless the bytes are certainly invalid
        self._window.extend(shown)
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
        """Return the rest of the text. The last character may be incomplete."""
        text = self._decode(self._window)
        piece = text[self._num_released :]
        self._num_released = len(text)
        return piece


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
        self.num_chars = max(map(len, self._stops), default=0)
        """The length of the longest stop string."""
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

    def match_end(self, text: str) -> None:
        """Match a stop string that includes special tokens.

        `text` is the end of the sample with special tokens.
        """
        matched = next((stop for stop in self._stops if text.endswith(stop)), None)
        if self.matched is None and matched is not None:
            self.matched = matched
            if not self._keep_match:
                self._held = ""

    def finish(self) -> str:
        """Return the text that was held back, because no more text follows."""
        released, self._held = self._held, ""
        return released


class SampleText:
    """Turns the tokens of a running sample into text that ends at a stop string or stop token."""

    def __init__(
        self,
        decode: Decode,
        *,
        stops: Sequence[str],
        stop_tokens: frozenset[int],
        keep_stop: bool = False,
        hidden: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """With `keep_stop`, the text includes the stop string or token that ended the sample.

        The first `min_tokens` tokens are not searched for stop strings. The tokens in `hidden` are
        left out of the text.
        """
        self._decode = decode
        self._detokenizer = Detokenizer(decode, hidden)
        self._stops = StopStrings(stops, keep_match=keep_stop)
        self._num_exempt = min_tokens
        self._last: list[int] = []
        """The last tokens, in which the engine may have found a stop string with special tokens."""
        self._stop_tokens = frozenset[int]() if keep_stop else stop_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the new text."""
        if self._num_exempt:
            num = min(self._num_exempt, len(tokens))
            self._num_exempt -= num
            return self._detokenizer.feed(tokens[:num]) + (self.feed(tokens[num:]) if tokens[num:] else "")
        if self._stops.num_chars:
            self._last = [*self._last, *tokens][-_MAX_INCOMPLETE * self._stops.num_chars :]
        # Only the last token of a sample can be a stop token
        if tokens and tokens[-1] in self._stop_tokens:
            tokens = tokens[:-1]
        return self._stops.feed(self._detokenizer.feed(tokens))

    def finish(self) -> str:
        """Return the rest of the text."""
        text = self._stops.feed(self._detokenizer.finish())
        # Special tokens are not in the text, but may be in a stop string
        if self._last:
            self._stops.match_end(self._decode(self._last))
        return text + self._stops.finish()
