"""Checks of what clients connect to: address, port, certificate."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.process.setup import CannotServe, check_certificate, listen
from skyrl_tx.tools.doctor.findings import Finding, Subject, error, ok, warning

_RENEW_DAYS = 14
_EXPIRED = 10
"""Code of an expired certificate (X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL)."""


def check_port(subject: Subject) -> Iterator[Finding]:
    """Check that the server can listen on its address."""
    settings, pid = subject.settings, subject.server_pids.get("api")
    address = f"{settings.host}:{settings.port}"
    try:
        with contextlib.closing(listen(settings.host, settings.port)):
            yield ok("port", f"{address} is free")
    except CannotServe as problem:
        if pid is not None:
            yield ok("port", f"{address} is in use; the server of this data directory runs as process {pid}")
        else:
            yield error("port", str(problem), "stop the other program, or choose another --host or --port")


def check_tls(subject: Subject) -> Iterator[Finding]:
    """Check the certificate, its key and its expiry."""
    settings = subject.settings
    try:
        check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    except CannotServe as problem:
        yield error("tls", str(problem), "give the certificate with its chain, and its key without a password, in PEM")
        return
    if settings.ssl_certfile is not None:
        yield _check_expiry(settings)
    elif not settings.for_api().is_loopback and not settings.trusted_proxies:
        yield warning(
            "tls",
            f"--host {settings.host} without TLS: an observer of the network has all keys",
            "give --ssl-certfile, or put the server behind a proxy with TLS and name it with --trusted-proxies",
        )


def _check_expiry(settings: ServerSettings) -> Finding:
    renew = "renew it, then restart the server"
    try:
        expires_at = _expiry(settings)
    except ssl.SSLError as problem:
        if isinstance(problem, ssl.SSLCertVerificationError) and problem.verify_code == _EXPIRED:
            return error("tls", f"the certificate {settings.ssl_certfile} has expired", renew)
        return warning("tls", f"the certificate cannot be verified: {problem}", "clients may refuse it, too")
    days = (expires_at - time.time()) / 86_400
    shown = datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%d")
    if days < _RENEW_DAYS:
        return warning("tls", f"the certificate expires in {days:.0f} days, on {shown}", renew)
    return ok("tls", f"the certificate is valid until {shown}")


def _expiry(settings: ServerSettings) -> float:
    """Return when the certificate expires, by a TLS handshake in memory with a client that trusts it.

    Raises ssl.SSLError if it is not valid.
    """
    assert settings.ssl_certfile is not None
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted
    trusting.load_verify_locations(settings.ssl_certfile)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = client.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(found["notAfter"]))
