"""Writes the tables of docs/guides/which_model.md: the plans of `skyrl-tx plan` for common models and GPUs.

`make reference` runs `python -m docs.which_model`, which takes about 90 seconds. tests/repo/test_reference.py compares
the rows of one model with the page, of two more in a slow test, and all rows in an exhaustive test.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from docs.markdown import table
from skyrl_tx.tools.cli import main as run_command
from tests.support.model_configs import QWEN3_4B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M
from tests.support.shared_traces import shared_traces

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "guides" / "which_model.md"
BEGIN, END = "<!-- begin: make reference -->", "<!-- end: make reference -->"
DEVICES: Mapping[str, str] = {
    "rtx4090": "24 GB",
    "l40s": "48 GB",
    "h100": "80 GB",
    "h200": "141 GB",
    "h100:8": "8 x 80 GB",
}
"""The devices of the tables, with their memory. GPUs with the same memory fit the same models."""
GIB = 2**30


def _read_published_config(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "unit" / "models" / "hub_configs" / f"{name}.json").read_text())


def models() -> dict[str, Mapping[str, Any]]:
    """Return the config.json of each model, by its id on the hub."""
    return {
        "Qwen/Qwen3-0.6B": QWEN3_600M,
        "Qwen/Qwen3-4B": QWEN3_4B,
        "Qwen/Qwen3-8B": QWEN3_8B,
        "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
        "Qwen/Qwen3.5-4B": _read_published_config("Qwen3.5-4B"),
        "Qwen/Qwen3.5-9B": _read_published_config("Qwen3.5-9B"),
        "Qwen/Qwen3.5-27B": _read_published_config("Qwen3.5-27B"),
        "mistralai/Mistral-7B-v0.3": _read_published_config("Mistral-7B-v0.3"),
        "openai/gpt-oss-20b": _read_published_config("gpt-oss-20b"),
        "zai-org/GLM-4.5-Air": _read_published_config("GLM-4.5-Air"),
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a model on a device."""

    model: str
    device: str
    content: Mapping[str, Any]
    """The JSON that `skyrl-tx plan --json` prints."""

    def cells(self) -> Sequence[str]:
        """Return the row of the plan in the table of sizes."""
        limits = self.content["limits"]
        memory = {item["item"]: item["bytes"] for item in self.content["memory"]}
        sizes = [f"{axis}={size}" for axis, size in self.content["mesh"].items() if size > 1]
        return (
            f"`{self.model}`",
            f"`{self.device}`",
            f"{memory['base weights'] / GIB:.1f} GiB",
            f"{limits['kv_tokens']:,}",
            f"{limits['context_tokens']:,}",
            f"{min(limits['row_tokens'], self.max_context):,}",
            str(limits["models"]),
            f"`{','.join(sizes)}`" if sizes else "–",
        )

    @property
    def max_context(self) -> int:
        """The longest sequence of the model by its config.json."""
        config = models()[self.model]
        return config.get("text_config", config)["max_position_embeddings"]


def make_plans(names: Sequence[str]) -> list[Plan]:
    """Run `skyrl-tx plan` for each of the models on each device."""
    plans: list[Plan] = []
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ), shared_traces():
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
        for name in names:
            path = Path(directory, name)
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(models()[name]))
            for device in DEVICES:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    status = run_command(["plan", "--base-model", str(path), "--device", device, "--json"])
                assert status in (0, 1), f"skyrl-tx plan ended with status {status}"
                plans.append(Plan(name, device, json.loads(printed.getvalue())))
    return plans


def overview_row(plans: Sequence[Plan]) -> Sequence[str]:
    """Return the row of a model in the first table: how many training runs fit on each device."""
    runs = [str(plan.content["limits"]["models"]) if plan.content["fits"] else "–" for plan in plans]
    return (f"`{plans[0].model}`", *runs)


def detail_rows(plans: Sequence[Plan]) -> list[Sequence[str]]:
    """Return the rows of the second table, which has only plans that fit."""
    return [plan.cells() for plan in plans if plan.content["fits"]]


def tables() -> Iterator[str]:
    """Yield both tables."""
    plans = make_plans(list(models()))
    by_model = [[plan for plan in plans if plan.model == name] for name in models()]
    yield table(("Model", *(f"{memory} (`{name}`)" for name, memory in DEVICES.items())), map(overview_row, by_model))

    yield "## Sizes in detail"
    yield table(
        (
            "Model",
            "GPU",
            "Weights per GPU",
            "KV cache, tokens",
            "Longest sample",
            "Longest training sequence",
            "Runs",
            "Mesh",
        ),
        detail_rows(plans),
    )


def main() -> None:
    """Replace the tables of the page."""
    before, rest = PATH.read_text().split(BEGIN)
    _, after = rest.split(END)
    blocks = "\n\n".join(tables())
    PATH.write_text(f"{before}{BEGIN}\n\n{blocks}\n\n{END}{after}")


if __name__ == "__main__":
    main()
