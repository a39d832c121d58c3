"""Says whether the package index has a release of tinker that is newer than the newest tested one (`make sdk-watch`).

pip asks the index, so that its settings for mirrors and proxies apply. The exit status is 1 if there is a newer
release, and the output says what to do then.
"""

import re
import subprocess
import sys

from packaging.version import Version

from tests.support.client_environments import SDKS

_NEXT_STEPS = """\
Add it to SDKS in tests/support/client_environments.py, run tests/sdks and tests/api/test_parity.py with it, read its
changelog, move the endpoints that it calls from UNVERIFIED_ENDPOINTS to SDK_ENDPOINTS in
skyrl_tx/tools/conformance/traffic.py, and raise NEWEST_TESTED_SDK in skyrl_tx/server/routes/sessions.py."""


def find_releases(output: str) -> list[Version]:
    """Return the versions that `pip index versions` lists, newest first."""
    listed = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
    if listed is None:
        raise ValueError(f"pip lists no versions: {output!r}")
    return sorted(map(Version, listed[1].split(", ")), reverse=True)


def main() -> int:
    """Print the newest release and the newest tested one."""
    command = [sys.executable, "-m", "pip", "index", "versions", "tinker"]
    newest = find_releases(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]
    tested = max(map(Version, SDKS))
    if newest <= tested:
        print(f"tinker {tested}, the newest tested release, is the newest one that the package index has")
        return 0
    print(f"tinker {newest} is newer than {tested}, the newest tested release.\n{_NEXT_STEPS}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
