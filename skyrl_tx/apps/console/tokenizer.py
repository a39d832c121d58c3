"""Decodes tokens for people, with the tokenizer in the model's directory."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_FILE = "tokenizer.json"


class TextDecoder:
    """The tokenizer of a model, read at its first use; without a file of it there is no text."""

    def __init__(self, model: str) -> None:
        self._path = Path(model) / _FILE
        self._lock = threading.Lock()
        self._is_read = False
        self._tokenizer: Any = None

    def __call__(self, tokens: Sequence[int]) -> str | None:
        """Return the text of tokens; None if the tokenizer is not there or does not know them."""
        with self._lock:
            if not self._is_read:
                self._tokenizer, self._is_read = self._read(), True
        if self._tokenizer is None:
            return None
        try:
            return str(self._tokenizer.decode([token for token in tokens if token >= 0], skip_special_tokens=False))
        except OverflowError:
            return None

    def _read(self) -> Any:
        if not self._path.is_file():
            return None
        try:
            from tokenizers import Tokenizer  # 20 ms and 10 MB, for those who read samples

            return Tokenizer.from_file(str(self._path))
        except Exception as error:  # the library raises this very class
            _log.warning("%s cannot be read, so the console shows token ids: %s", self._path, error)
            return None
