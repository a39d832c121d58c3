"""Certificates for tests, made by the program `openssl`."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
_EXTENSIONS = """\
subjectAltName=IP:127.0.0.1,DNS:localhost
basicConstraints=critical,CA:FALSE
extendedKeyUsage=serverAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate for 127.0.0.1 and localhost with its key and its authority, as PEM files."""

    certfile: Path
    keyfile: Path
    authority: Path


def create_certificate(directory: Path, *, days: int = 1) -> Certificate:
    """Create an authority, and a certificate that is valid for some days; the authority's own is valid for one."""
    names = "certificate.pem", "key.pem", "authority.pem", "authority-key.pem", "request.pem", "extensions"
    certificate, key, authority, authority_key, request, extensions = (directory / name for name in names)
    extensions.write_text(_EXTENSIONS)
    _openssl("req", "-x509", *_NEW_KEY, "-days", "1", "-subj", "/CN=tests", "-keyout", authority_key, "-out", authority)
    _openssl("req", "-new", *_NEW_KEY, "-subj", "/CN=localhost", "-keyout", key, "-out", request)
    signing = "-days", str(days), "-CA", authority, "-CAkey", authority_key, "-CAcreateserial", "-extfile", extensions
    _openssl("x509", "-req", "-in", request, "-out", certificate, *signing)
    return Certificate(certificate, key, authority)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
