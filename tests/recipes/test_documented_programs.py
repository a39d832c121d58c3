"""The training programs in the README, on the start page and in the reward function guide run as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import LiveServer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "reward_function.py"
ADDRESS = "http://127.0.0.1:8000"
TRAINING = "create_lora_training_client"


def read_program(page: str) -> str:
    """Return the only Python block of a page that creates a training client."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (program,) = (block for block in blocks if TRAINING in block)
    return program


def run_program(program: str, server: LiveServer) -> str:
    """Run a program against a server with the tiny model.

    Its random weights need a high learning rate.
    """
    program = program.replace(ADDRESS, server.url).replace("Qwen/Qwen3-8B", "tiny")
    program = program.replace("learning_rate=1e-4", "learning_rate=1e-2")
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_guide_shows_the_script() -> None:
    assert read_program("docs/guides/reward_function.md") == SCRIPT.read_text()


@pytest.mark.slow
def test_programs_lower_the_loss_and_raise_the_reward(tmp_path: Path) -> None:
    # The server computes longer than it compiles, so it has the compiler options of the product.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with LiveServer(tmp_path / "server", flags=("--base-model", "tiny"), environment=environment) as server:
        for page in ("README.md", "docs/index.md"):
            output = run_program(read_program(page), server)
            losses = [float(loss) for loss in re.findall(r"^\d+ ([\d.]+)$", output, re.MULTILINE)]
            assert len(losses) >= 5 and losses[-1] < losses[0] / 2, f"{page}: {output}"

        output = run_program(SCRIPT.read_text(), server)
        rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", output)]
        assert len(rewards) == 15 and rewards[0] < 0.05 and rewards[-1] > 0.3, output
        assert re.search(r"^to sample from: tinker://\S+/sampler_weights/final$", output, re.MULTILINE)
