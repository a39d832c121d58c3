"""The cookbook's sl_loop and rl_loop run unmodified against a server."""

import re
from dataclasses import replace

import httpx
import pytest

from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.tools.quickstart.model import write_tiny_model
from skyrl_tx.tools.quickstart.training import load_excerpt
from tests.recipes.test_recipes import count_shared_tokens
from tests.support.client_environments import COOKBOOK_WITH_TRACKIO
from tests.support.live_server import LiveServer

pytestmark = pytest.mark.slow

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."  # rl_loop adds it to questions
NUM_QUESTIONS = 8
NUM_RL_STEPS = 3


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_sl_loop_lowers_the_loss_on_gsm8k(working_directory, server):
    working_directory.write_conversations([conversation(row.text, row.answer) for row in load_excerpt().train])
    metrics = working_directory.run("sl_loop", server.url, "batch_size=16", "learning_rate=1e-2")
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert len(losses) == 24
    assert losses[0] > 6.5, "an untrained model is about as good as a uniform guess: ln 1024 = 6.93"
    assert sum(losses[-4:]) / 4 < 3.8
    assert working_directory.last_checkpoint("sl_loop").startswith("tinker://")


def test_rl_loop_continues_from_a_checkpoint_of_sl_loop(working_directory, server):
    questions = load_excerpt().train[:NUM_QUESTIONS]
    working_directory.write_conversations(
        [working_directory.make_boxed_prompt(question, SUFFIX) for question in questions] * 60
    )
    working_directory.write_questions(questions * NUM_RL_STEPS)
    working_directory.run("sl_loop", server.url, "batch_size=16", "learning_rate=1e-2")

    checkpoint = working_directory.last_checkpoint("sl_loop")

    for loss in ("importance_sampling", None):  # None: the default, stable_reinforce
        log = f"rl_loop-{loss}"
        working_directory.start_from(log, checkpoint)

        metrics = working_directory.run(
            "rl_loop",
            server.url,
            f"batch_size={NUM_QUESTIONS}",
            "group_size=8",
            "max_tokens=24",
            "learning_rate=1e-3",
            *([] if loss is None else [f"loss_fn={loss}"]),
            log=log,
        )

        steps = [row for row in metrics if "reward/total" in row]
        assert len(steps) == NUM_RL_STEPS
        assert any(0 < row["reward/total"] < 1 for row in steps), "the checkpoint answers some questions, not all"
        # rl_loop skips batches with equal rewards. Only a result of the server contains a gradient norm.
        trained = [row for row in steps if "unclipped_grad_l2:mean" in row]
        assert trained and all(row["unclipped_grad_l2:mean"] > 0 for row in trained)
        saved = working_directory.last_checkpoint(log)
        assert saved != checkpoint
        assert count_shared_tokens(server.url, saved) > 0, "the samples of a question share it"


def test_rl_loop_logs_its_reward_to_the_server(working_directory, server, client_environment, tmp_path):
    """Trackio needs only two variables and the recipe's own argument.

    The run finds its model by name.
    """
    variables = {
        "TRACKIO_SERVER_URL": f"{server.url}/trackio",
        "TRACKIO_WRITE_TOKEN": "tml-local",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }

    environment = replace(client_environment(COOKBOOK_WITH_TRACKIO), variables=variables)
    place = replace(working_directory, environment=environment)
    place.write_questions(load_excerpt().train[:8])
    names = ("wandb_project=gsm8k", "wandb_name=first")
    metrics = place.run("rl_loop", server.url, "batch_size=4", "group_size=2", "max_tokens=8", *names)
    rewards = [row["reward/total"] for row in metrics if "reward/total" in row]
    (run,) = httpx.get(f"{server.url}/api/v1/logged_runs").json()["logged_runs"]
    assert (run["project"], run["name"], run["config"]["lora_rank"]) == ("gsm8k", "first", 32)
    assert run["training_run_id"] is not None

    series = httpx.get(f"{server.url}/api/v1/training_runs/{run['training_run_id']}/metrics").json()["logged"]
    assert [point["metrics"]["reward/total"] for point in series] == rewards and len(rewards) == 2
    page = httpx.get(f"{server.url}/training_runs/{run['training_run_id']}").text
    (shown,) = re.findall(r"<span>Reward</span>([^<]+)", page)
    assert float(shown) == pytest.approx(rewards[-1], abs=0.01)
    curve = httpx.get(f"{server.url}/console/data/training_runs/{run['training_run_id']}/curves").json()["logged"]
    assert curve["reward/total"]["value"] == rewards


def test_both_loops_run_with_their_default_model(working_directory, tmp_path):
    """The model has the recipe's default name. The server has a tiny model with that architecture."""
    name = "Qwen/Qwen3.5-9B-Base"
    place, model = working_directory, working_directory.root / name
    write_tiny_model(model)  # for its tokenizer
    sizes = {"vocab_size": 1024, "hidden_size": 128, "mlp_size": 256, "num_layers": 4, "max_context_length": 8192}
    write_model(model, "Qwen3_5ForCausalLM", **sizes, eos_token_id=1000, tied_embeddings=False)
    rows = load_excerpt().train
    place.write_conversations([conversation(row.text, row.answer) for row in rows[:64]])
    place.write_questions(rows[:4])
    flags = ("--base-model", str(model), "--served-model-name", name)

    with LiveServer(tmp_path / "server", flags=flags) as server:
        for recipe, arguments in (
            ("sl_loop", ("batch_size=16", "learning_rate=1e-2")),
            ("rl_loop", ("batch_size=4", "group_size=2", "max_tokens=8")),
        ):
            place.run_module(f"recipes.{recipe}", server.url, f"log_path={place.log(recipe)}", *arguments)
            assert place.last_checkpoint(recipe).startswith("tinker://")
    losses = [row["train_mean_nll"] for row in place.metrics("sl_loop")]
    assert losses[-1] < losses[0] - 0.5
    assert [row["reward/total"] for row in place.metrics("rl_loop")]
