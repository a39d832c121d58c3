"""Tools for testing backends: a test suite, a fake backend and tiny models.

Third-party backends can use them too. `backend_suite` needs pytest, which the extra `testing`
installs.
"""

import sys

# With this, a failed assertion of the suite shows the compared values. A server must not import pytest.
if pytest := sys.modules.get("pytest"):
    _MODULES = ("backend_driver", "backend_suite", "loss_checks", "sampling_checks", "state_checks")
    pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _MODULES))
