"""An S3 server for tests, in a separate process."""

import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from tests.support.client_environments import PreparedEnvironment

ACCESS_KEY, SECRET_KEY = "AKIAOFTESTS", "a-secret-that-no-log-has"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server. It accepts all credentials."""

    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def create_bucket(self, name: str) -> None:
        """Create a bucket."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()


def variables(endpoint: str) -> Mapping[str, str]:
    """Return the environment variables that connect clients to a server at an address."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }


@contextmanager
def s3_server(environment: PreparedEnvironment) -> Generator[S3Server]:
    """Run a server in the environment `OBJECT_STORE`."""
    script = Path(__file__).parent / "s3_process.py"
    process = subprocess.Popen(
        [environment.python, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment.environment,
    )
    assert process.stdin is not None and process.stdout is not None

    try:
        yield S3Server(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
