"""The scripts of examples/gsm8k run as subprocesses against a server with the tiny model."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.live_server import LiveServer
from tests.support.torch_example import torch_environment

SCRIPTS = Path(__file__).parents[2] / "examples" / "gsm8k"
MODEL_NAME = "Qwen/Qwen3-0.6B"


def run_script(name, *arguments, cwd):
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["inference.py", "sft.py", "rl.py", "evaluate.py"])
def test_help_describes_the_script_and_its_defaults(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    output = capsys.readouterr().out
    assert "GSM8K" in output and "default:" in output
    assert len((SCRIPTS / name).read_text().splitlines()) <= 90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "architecture"),
    [("jax", "qwen3"), pytest.param("jax", "qwen3_5", marks=pytest.mark.exhaustive), ("torch", "qwen3")],
)
def test_sft_rl_inference_and_evaluation_run_in_sequence(tmp_path, backend, architecture):
    environment = None
    if backend == "torch":
        pytest.importorskip("torch")
        environment = torch_environment(tmp_path / "installed")
    model = write_tiny_model(tmp_path / "model", architecture)
    data = tmp_path / "gsm8k.jsonl"  # short answers, so that a tiny model completes them
    rows = [{"question": f"How many legs have {n} cats?", "answer": f"{n} * 4.\n#### {n * 4}"} for n in range(1, 41)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--base-model", str(model), "--served-model-name", MODEL_NAME, "--backend", backend)
    with LiveServer(tmp_path / "server", flags=flags, environment=environment) as server:
        common = ("--base-url", server.url, "--tokenizer", model, "--data", data)

        trained = run_script(
            "sft.py", *common, "--batch-size", "16", "--steps", "30", "--learning-rate", "1e-2", cwd=tmp_path
        )
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", trained)]
        assert len(losses) == 30 and losses[0] > 6 and losses[-1] < 1.5
        state, weights = re.findall(r"tinker://\S+", trained)
        assert "/weights/final" in state and "/sampler_weights/final" in weights

        sizes = ("--groups", "8", "--group-size", "8", "--steps", "2", "--max-tokens", "32")
        reinforced = run_script(
            "rl.py", *common, *sizes, "--checkpoint", state, "--learning-rate", "1e-3", cwd=tmp_path
        )
        assert any(0 < float(reward) < 1 for reward in re.findall(r"reward ([\d.]+)", reinforced))
        assert any(int(count) for count in re.findall(r"trained on (\d+)", reinforced))
        weights = re.findall(r"tinker://\S+/sampler_weights/final", reinforced)[-1]

        output = run_script("inference.py", *common, "--checkpoint", weights, "--max-tokens", "32", cwd=tmp_path)
        assert "4 answers in answers.jsonl" in output
    assert re.match(r"right \d/4 \(.*%\); with a number \d", run_script("evaluate.py", "--show", "1", cwd=tmp_path))
