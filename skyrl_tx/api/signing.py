"""Texts that prove by themselves that this server wrote them, until a time that is part of them."""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

_KEY_FILE = "signing.key"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A secret of the data directory: what one process signed, the next one still takes for signed."""

    secret: bytes

    @classmethod
    def of(cls, data_dir: Path) -> "SigningKey":
        """Read the directory's key; the first look makes it. Raises ValueError for a file that holds none."""
        path = data_dir / _KEY_FILE
        if not path.exists():
            _write_once(path, secrets.token_bytes(_KEY_BYTES))
        secret = path.read_bytes()
        if len(secret) != _KEY_BYTES:
            raise ValueError(f"{path} holds {len(secret)} bytes, not a key of {_KEY_BYTES}; remove it for a new one")
        return cls(secret)

    def sign(self, *parts: str) -> str:
        """Return what proves these parts, in this order. The first names the purpose."""
        message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()

    def proves(self, signature: str, *parts: str) -> bool:
        """Whether `sign` gave this for these parts."""
        return hmac.compare_digest(self.sign(*parts).encode(), signature.encode())


def _write_once(path: Path, content: bytes) -> None:
    """Make a private file, whole or not at all; one that is there by then stays."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        temporary.unlink()
