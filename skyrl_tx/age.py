"""Encryption to age recipients (age-encryption.org/v1), as `age -d` undoes it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyrage

from skyrl_tx.contract.errors import UserError

SUFFIX = ".age"
_age: Any = pyrage  # the extension has no types


def check_recipients(recipients: Collection[str], field: str) -> None:
    """Raise UserError for one that is no age or SSH public key, naming the field."""
    _read(recipients, field)


def encrypt_files(directory: Path, recipients: Collection[str]) -> None:
    """Replace each file of a directory by one of the same name and `.age`, which only the recipients can read."""
    keys = _read(recipients, "age_encryption_recipients")
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        _age.encrypt_file(str(path), f"{path}{SUFFIX}", keys)
        path.unlink()


def _read(recipients: Collection[str], field: str) -> list[Any]:
    keys: list[Any] = []
    for text in recipients:
        if text.upper().startswith("AGE-SECRET-KEY-"):  # never repeated: errors are stored
            raise UserError(
                f"{field}: holds a secret key; recipients are public keys (age1…), as `age-keygen -y` shows"
            )
        kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
        try:
            keys.append(kind.from_str(text))
        except _age.RecipientError as error:
            raise UserError(f"{field} {text[:100]!r}: neither an age1… nor an SSH public key ({error})") from error
    return keys
