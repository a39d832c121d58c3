"""The quickstart command, with fewer steps, as a subprocess."""

import json
import os
import re
import subprocess
import sys

import pytest

from skyrl_tx.apps.history import logged_metrics
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import Store
from skyrl_tx.tools.quickstart.model import write_tiny_model
from skyrl_tx.tools.quickstart.training import load_excerpt

CURVES = ("train_nll", "held_out_nll", "reward", "held_out_reward")
pytestmark = pytest.mark.slow


def run_quickstart(*arguments, cwd):
    """Run the command with the compiler options of the product: it computes longer than it compiles."""
    command = [sys.executable, "-m", "skyrl_tx", "quickstart", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def parse_figures(output, name):
    found = re.search(rf"^{name} +([\d.]+) -> ([\d.]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def quickstart(directory):
    """One run of the command, which the tests of its results share."""
    done = run_quickstart("--steps", "30", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_quickstart_trains_plots_curves_and_saves_checkpoints(directory, quickstart):
    assert quickstart.stderr == ""
    before, after = parse_figures(quickstart.stdout, "Held-out loss")
    assert before > 6.5 and after < 4.0
    assert all(0 <= value <= 1 for value in parse_figures(quickstart.stdout, "Held-out reward"))
    assert re.search(r"^Checkpoints tinker://\S+/weights/quickstart ", quickstart.stdout, re.MULTILINE)
    assert re.search(r"^ +tinker://\S+/sampler_weights/quickstart ", quickstart.stdout, re.MULTILINE)
    assert load_excerpt().held_out[0].text in quickstart.stdout
    assert (directory / "skyrl-tx-quickstart" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "stopping" in (directory / "skyrl-tx-quickstart" / "server.log").read_text()


def test_quickstart_logs_its_reward_to_its_run(directory, quickstart):
    link = re.search(r"^Watch it live: http://127\.0\.0\.1:\d+/training_runs/(\S+) ", quickstart.stdout, re.MULTILINE)
    assert link and quickstart.stdout.index(link[0]) < quickstart.stdout.index("Supervised:"), "the link comes first"
    store = Store.open(directory / "skyrl-tx-quickstart" / "server", role="tool")
    points = store.read(lambda tx: logged_metrics.read_points(tx, logged_metrics.list_run_ids(tx, ModelId(link[1]))))
    store.close()
    curves = {name: sorted(point.step for point in points if name in point.values) for name in CURVES}
    assert curves == {
        "train_nll": list(range(1, 31)),
        "held_out_nll": [0, 30],
        "reward": [31, 32, 33, 34],
        "held_out_reward": [30, 34],
    }


@pytest.mark.exhaustive  # test_gsm8k_scripts.py also trains this family
def test_quickstart_trains_qwen3_5(tmp_path):
    done = run_quickstart("--architecture", "qwen3_5", "--steps", "30", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert "(Qwen3.5 architecture, random weights" in done.stdout
    before, after = parse_figures(done.stdout, "Held-out loss")
    assert before > 6.5 and after < 4.0
    config = json.loads((tmp_path / "skyrl-tx-quickstart" / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]


def test_the_model_of_another_run_is_not_overwritten(tmp_path):
    weights = write_tiny_model(tmp_path / "skyrl-tx-quickstart" / "model") / "model.safetensors"
    before = weights.read_bytes()
    done = run_quickstart("--architecture", "qwen3_5", cwd=tmp_path)
    assert done.returncode == 2 and weights.read_bytes() == before
    assert "--output skyrl-tx-quickstart has a run with --architecture qwen3; choose another directory" in done.stderr


def test_error_message_names_the_architectures(tmp_path):
    done = run_quickstart("--architecture", "gemma", cwd=tmp_path)
    assert done.returncode == 2
    assert "--architecture 'gemma': Input should be 'qwen3' or 'qwen3_5'" in done.stderr


def test_error_message_names_a_missing_data_file(tmp_path):
    done = run_quickstart("--data", "absent.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "absent.jsonl" in done.stderr and "Traceback" not in done.stderr
