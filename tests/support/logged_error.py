"""Find the logged error that a client's message refers to."""

import re

import pytest

_REFERENCE = re.compile(r"; the server's log has it under reference ([0-9a-f]{8})")


def find_logged_error(message: str, caplog: pytest.LogCaptureFixture) -> BaseException:
    """Return the exception that the log has under the reference in a message. Raises AssertionError without one."""
    named = _REFERENCE.search(message)
    assert named is not None, message
    (record,) = (record for record in caplog.records if f"(reference {named[1]})" in record.getMessage())
    assert record.exc_info is not None and record.exc_info[1] is not None
    return record.exc_info[1]
