"""Light modules do not import heavy libraries, and the help of a command needs no package of an extra."""

import json
import subprocess
import sys

HEAVY = ("flax", "jax", "matplotlib", "tinker", "torch", "transformers")
LIGHT = (
    "skyrl_tx.contract.backend",
    "skyrl_tx.store.database",
    "skyrl_tx.backends.registry",
    "skyrl_tx.backends.jax",
    "skyrl_tx.integrations.vllm",
    "skyrl_tx.server.app",
    "skyrl_tx.engine.engine",
    "skyrl_tx.launch.serving",
    "skyrl_tx.tools.cli",
    "skyrl_tx.tools.quickstart.model",  # `serve --base-model tiny` works without the extra `quickstart`
)
PROGRAM = f"""
import importlib, json, sys
loaded = {{}}
for module in {LIGHT}:
    importlib.import_module(module)
    loaded[module] = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps(loaded))
"""


def test_import_loads_no_device_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {module: [] for module in LIGHT}


OF_EXTRAS = ("httpx", "matplotlib", "obstore", "psycopg", "pytest", "ray", "tinker", "torch")
HELP = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({OF_EXTRAS}))
from skyrl_tx.tools.cli import COMMANDS, main
helps = {{}}
for name in COMMANDS:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([name, "--help"])
    helps[name] = output.getvalue()[:6]
print(json.dumps(helps))
"""


def test_the_help_of_each_command_needs_no_package_of_an_extra() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    helps = json.loads(done.stdout)
    assert "export" in helps and set(helps.values()) == {"usage:"}
