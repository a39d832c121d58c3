"""Checks of the object store that `--artifacts` names."""

import time
from collections.abc import Iterator

from skyrl_tx.artifacts import ArtifactsUnreachable, PlaceRefused, open_bucket, recorded_url
from skyrl_tx.tools.doctor.findings import Finding, Subject, error, ok, warning

_SLOW_S = 2.0
"""Time of five small requests above which the store is far away."""
_NEAR = "use a store in the same region"


def check_object_store(subject: Subject) -> Iterator[Finding]:
    """Check that the object store can be written, listed, read and cleared, and that objects are created once."""
    settings = subject.settings
    url = settings.artifacts or recorded_url(settings.data_dir)
    if url is None:
        return
    started = time.monotonic()
    try:
        creates_once = open_bucket(settings.data_dir, url).probe()
    except PlaceRefused as problem:
        yield error("storage", str(problem), "see the guide: object storage")
        return
    except ArtifactsUnreachable as problem:
        advice = "check the bucket, the credentials and the endpoint in the provider's environment variables"
        yield error("storage", f"{url}: {problem}", advice)
        return
    elapsed = time.monotonic() - started
    if not creates_once:
        advice = "use a store with conditional writes (If-None-Match), which the manifest of an artifact needs"
        yield error("storage", f"{url}: an object was created twice", advice)
    elif elapsed > _SLOW_S:
        yield warning("storage", f"{url} can be written, and is slow: {elapsed:.1f} s for five small requests", _NEAR)
    else:
        yield ok("storage", f"{url} can be written; five small requests take {1000 * elapsed:.0f} ms")
