"""Encryption of files for age recipients (age-encryption.org/v1)."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyrage

from skyrl_tx.contract.errors import UserError

ENCRYPTED_SUFFIX = ".age"
_age: Any = pyrage  # the extension is untyped


def encrypt_files(directory: Path, recipients: Collection[str]) -> None:
    """Replace each file in a directory by an encrypted file with the additional suffix `.age`."""
    keys = parse_recipients(recipients, "age_encryption_recipients")
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        _age.encrypt_file(str(path), f"{path}{ENCRYPTED_SUFFIX}", keys)
        path.unlink()


def parse_recipients(recipients: Collection[str], field: str) -> list[Any]:
    """Parse age or SSH public keys.

    Raises UserError with the name of the field for anything else.
    """
    keys: list[Any] = []
    for text in recipients:
        if text.upper().startswith("AGE-SECRET-KEY-"):  # the error must not quote it, because errors are stored
            raise UserError(
                f"{field}: contains a secret key; pass the public key (age1…) instead, which `age-keygen -y` prints"
            )
        kind = _age.ssh.Recipient if text.startswith("ssh-") else _age.x25519.Recipient
        try:
            keys.append(kind.from_str(text))
        except _age.RecipientError as error:
            raise UserError(f"{field} {text[:100]!r}: neither an age1… nor an SSH public key ({error})") from error
    return keys
