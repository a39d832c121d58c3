"""A folder in which the cookbook finds, offline and under their public names, a model and two data sets."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.quickstart.questions import Question
from skyrl_tx.quickstart.tiny_model import write_tiny_model
from skyrl_tx.testing.client_environments import COOKBOOK, PreparedEnvironment
from skyrl_tx.testing.live_server import LiveServer

MODEL_NAME = "Qwen/Qwen3-8B"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
RECIPE = Path(__file__).parent / "run_recipe.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The folder, and the environment whose programs run in it."""

    root: Path
    environment: PreparedEnvironment

    @property
    def model(self) -> Path:
        """Where the tiny model lies, under the name of a large one."""
        return self.root / MODEL_NAME

    def write_model(self) -> None:
        """Make the model."""
        write_tiny_model(self.model)

    def write_conversations(self, conversations: Sequence[Sequence[dict[str, str]]]) -> None:
        """Write the data set that sl_loop reads."""
        rows = [{"messages": list(messages)} for messages in conversations]
        self._write_dataset("HuggingFaceH4/no_robots", "default", rows)

    def write_questions(self, questions: Sequence[Question]) -> None:
        """Write the data set that rl_loop reads."""
        rows = [{"question": question.text, "answer": question.answer} for question in questions]
        self._write_dataset("openai/gsm8k", "main", rows)

    def run(self, recipe: str, url: str, *arguments: str) -> list[dict[str, Any]]:
        """Run a recipe to its end and return its metrics, one record a step; raises RuntimeError when it fails."""
        log = self.log(recipe)
        environment = replace(self.environment, variables=OFFLINE | {"HF_HOME": str(self.root / "cache")})
        told = (f"base_url={url}", f"model_name={MODEL_NAME}", f"log_path={log}", *arguments)
        environment.run(RECIPE, recipe, *told, cwd=self.root, timeout_s=900.0)
        return _read_lines(log / "metrics.jsonl")

    def log(self, recipe: str) -> Path:
        """Return the folder of a recipe's metrics and checkpoints."""
        return self.root / "logs" / recipe

    def last_checkpoint(self, recipe: str) -> str:
        """Return the path of the newest training checkpoint that a recipe saved."""
        return _read_lines(self.log(recipe) / "checkpoints.jsonl")[-1]["state_path"]

    def start_from(self, recipe: str, state_path: str) -> None:
        """Let a recipe find a checkpoint to go on from, as if it had saved it itself before its first step."""
        log = self.log(recipe)
        log.mkdir(parents=True)
        record = {"name": "start", "batch": 0, "state_path": state_path}
        (log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")

    def _write_dataset(self, name: str, config: str, rows: Sequence[dict[str, Any]]) -> None:
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        front = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
        (folder / "README.md").write_text(front)


@pytest.fixture
def workplace(client_environment, tmp_path):
    place = Workplace(root=tmp_path / "work", environment=client_environment(COOKBOOK))
    place.write_model()
    return place


@pytest.fixture
def server(workplace, tmp_path):
    flags = ("--base-model", str(workplace.model), "--served-model-name", MODEL_NAME)
    with LiveServer(tmp_path / "server", flags=flags) as server:
        yield server


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
