"""All cookbook recipes that can run offline run unmodified against one server.

Arguments reduce steps, batches and lengths, and set the model, teacher or judge. Other values are
defaults.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

pytestmark = pytest.mark.slow

MODEL_NAME = "Qwen/Qwen3-8B"
Metrics = list[dict[str, Any]]


def count_shared_tokens(url: str, checkpoint: str) -> float:
    """Return how many training tokens of the checkpoint's run were not computed.

    The run's history is exact as soon as a request has its result. The server's counters may be
    seconds older.
    """
    run_id = urlsplit(checkpoint).netloc
    curves = httpx.get(f"{url}/console/data/training_runs/{run_id}/curves").raise_for_status().json()["curves"]
    return sum(number for number in curves["shared_tokens"] if number is not None)


def get_values(metrics: Metrics, name: str) -> list[float]:
    return [row[name] for row in metrics if name in row]


def check_learning(metrics: Metrics) -> None:
    """Supervised training lowers the loss."""
    losses = get_values(metrics, "train_mean_nll")
    assert len(losses) >= 2 and losses[-1] < losses[0]


def check_scores(metrics: Metrics) -> None:
    """Supervised training lowers the loss, also on held-out data.

    A new sampler scores it in each evaluation.
    """
    check_learning(metrics)
    scores = get_values(metrics, "test/nll")
    assert len(scores) >= 2 and scores[-1] < scores[0]


def check_on_policy(metrics: Metrics) -> None:
    """In the first step, trainer and sampler have the same weights and agree on the logprob of each token."""
    assert abs(get_values(metrics, "optim/kl_sample_train_v2")[0]) < 1e-6


def check_reinforcement(metrics: Metrics) -> None:
    """Rewards differ, gradients are not zero, and the first step is on policy."""
    check_on_policy(metrics)
    assert max(get_values(metrics, "unclipped_grad_l2:mean")) > 0


def check_preference(metrics: Metrics) -> None:
    """The loss starts at ln 2, because policy and reference are equal.

    Then loss and accuracy improve.
    """
    losses = get_values(metrics, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0] and get_values(metrics, "accuracy")[-1] > 0.5


def check_distillation(metrics: Metrics) -> None:
    """Student and teacher are the same model, so their KL divergence is zero."""
    check_on_policy(metrics)
    assert get_values(metrics, "teacher_kl") == pytest.approx([0.0], abs=1e-5)


def check_self_distillation(metrics: Metrics) -> None:
    """The teacher sees the answer and the student does not, so gradients are not zero."""
    assert get_values(metrics, "sdft/mean_teacher_entropy")[0] > 0
    assert get_values(metrics, "unclipped_grad_l2:mean")[0] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe of the cookbook: module, arguments, and a check of its metrics.

    `{checkpoint}` in an argument becomes the path of the checkpoint of chat_sl.
    """

    module: str
    arguments: tuple[str, ...]
    check: Callable[[Metrics], None]
    shares_prompts: bool = False
    """Whether its requests have multiple examples with one prompt, which the server then computes once."""


NO_EVALS = "eval_every=0"
FROM_CHECKPOINT = "load_checkpoint_path={checkpoint}"
SHORT = ("max_tokens=16", "max_steps=1", NO_EVALS)
# The checkpoint's answers begin with an empty thought of six tokens. With nine tokens, some of its
# sums end and some do not.
SUMS = ("groups_per_batch=8", "group_size=8", "max_tokens=9", "max_steps=2", FROM_CHECKPOINT)

RECIPES = {
    "sl_basic": Recipe(module="sl_basic", arguments=("num_epochs=3", "eval_every=2"), check=check_scores),
    "off_policy_reasoning": Recipe(
        module="distillation.off_policy_reasoning",
        arguments=("batch_size=8", "max_prompts=64", "buffer_size=64", "max_steps=3", NO_EVALS),
        check=check_learning,
    ),
    "prompt_distillation": Recipe(
        module="prompt_distillation.train",
        arguments=("file_path=chats.jsonl", "batch_size=16", "max_steps=3", "learning_rate=1e-3"),
        check=check_learning,
    ),
    "rl_basic": Recipe(
        module="rl_basic", arguments=("max_tokens=32", FROM_CHECKPOINT), check=check_reinforcement, shares_prompts=True
    ),
    "math_rl arithmetic": Recipe(
        module="math_rl.train",
        arguments=("eval_every=1", "compute_post_kl=True", *SUMS),
        check=check_reinforcement,
        shares_prompts=True,
    ),
    "math_rl gsm8k": Recipe(
        module="math_rl.train",
        arguments=(
            *("env=gsm8k", "groups_per_batch=8", "group_size=16", "max_tokens=32", "max_steps=1", "eval_every=1"),
            FROM_CHECKPOINT,
        ),
        check=check_reinforcement,
    ),
    "math_rl stream_minibatch": Recipe(
        module="math_rl.train",
        arguments=(
            *("stream_minibatch_config.groups_per_batch=8", "stream_minibatch_config.num_minibatches=2"),
            *(NO_EVALS, *SUMS),
        ),
        check=check_reinforcement,
        shares_prompts=True,
    ),
    "math_rl async": Recipe(
        module="math_rl.train",
        arguments=("max_steps_off_policy=1", NO_EVALS, *SUMS),
        check=check_reinforcement,
        shares_prompts=True,
    ),
    "dpo": Recipe(
        module="preference.dpo.train",
        arguments=("batch_size=8", "max_steps=3"),
        check=check_preference,
        shares_prompts=True,
    ),
    "shorter": Recipe(module="preference.shorter.train", arguments=("batch_size=4", *SHORT), check=check_reinforcement),
    "on_policy_distillation": Recipe(
        module="distillation.on_policy_distillation",
        arguments=(f"teacher_model={MODEL_NAME}", "groups_per_batch=4", *SHORT),
        check=check_distillation,
        shares_prompts=True,
    ),
    "on_policy_multi_teacher": Recipe(
        module="distillation.on_policy_multi_teacher",
        arguments=(
            *(f"deepmath_teacher_model={MODEL_NAME}", f"tulu3_teacher_model={MODEL_NAME}", FROM_CHECKPOINT),
            *("deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2", *SHORT),
        ),
        check=check_reinforcement,
    ),
    "sdft": Recipe(module="sdft.train", arguments=("groups_per_batch=4", *SHORT), check=check_self_distillation),
    "sdft reverse": Recipe(
        module="sdft.train",
        arguments=("groups_per_batch=4", "reverse=True", "teacher_sync_every=1", *SHORT),
        check=lambda metrics: None,
    ),
    "rubric": Recipe(
        module="rubric.train",
        arguments=(
            *("train_jsonl_path=rubric.jsonl", "test_jsonl_path=rubric.jsonl", f"grader_llm_name={MODEL_NAME}"),
            *("groups_per_batch=4", *SHORT),
        ),
        check=check_on_policy,
    ),
    "guess_number": Recipe(
        module="multiplayer_rl.guess_number.train",
        arguments=("group_size=2", "batch_size=1", "max_tokens=8", "max_steps=1", NO_EVALS),
        check=check_on_policy,
    ),
    "twenty_questions": Recipe(
        module="multiplayer_rl.twenty_questions.train",
        arguments=("group_size=2", "batch_size=1", "max_tokens=8", "max_steps=1", NO_EVALS),
        check=check_on_policy,
    ),
    "rl_numerics_check": Recipe(
        module="rl_numerics_check.train",
        arguments=("group_size=2", "groups_per_batch=1", "max_tokens=32", "max_trajectory_tokens=4096", "max_steps=1"),
        check=check_on_policy,
    ),
}


@pytest.fixture(scope="module")
def checkpoint(recipes_directory: Any, recipes_server_url: str) -> str:
    """A checkpoint trained on the answer format of sums and GSM8K questions.

    It answers some of them.
    """
    metrics = recipes_directory.run(
        "chat_sl.train",
        recipes_server_url,
        *("dataset=sums.jsonl", "batch_size=32", "learning_rate=1e-2", "num_epochs=4"),
        "train_on_what=last_assistant_message",
        *("save_every=5", "rolling_save_every=2"),
    )
    check_learning(metrics)
    return recipes_directory.last_checkpoint("chat_sl.train")


SIMILAR_RECIPES = ("math_rl gsm8k", "sdft reverse", "twenty_questions")
"""Recipes that differ from a neighbouring recipe only in data or a setting, and make the same calls to the server."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in SIMILAR_RECIPES else ()) for name in RECIPES]
)
def test_recipe(recipes_directory: Any, recipes_server_url: str, checkpoint: str, name: str) -> None:
    recipe = RECIPES[name]
    arguments = [argument.replace("{checkpoint}", checkpoint) for argument in recipe.arguments]
    metrics = recipes_directory.run(recipe.module, recipes_server_url, *arguments, log=name)
    recipe.check(metrics)
    steps = [row["step"] for row in metrics]
    assert all(isinstance(step, int) for step in steps) and steps[0] == 0 and steps == sorted(steps), (
        "the recipe numbers its steps from 0, and no metric of the server overwrites `step`"
    )

    saved = recipes_directory.last_checkpoint(name)
    assert saved.startswith("tinker://")
    if recipe.shares_prompts:
        assert count_shared_tokens(recipes_server_url, saved) > 0


def test_rlhf_pipeline(recipes_directory: Any, recipes_server_url: str) -> None:
    """Supervised training, a reward model from comparisons, then reinforcement learning on its judgements."""
    recipes_directory.run_module(
        "recipes.preference.rlhf.rlhf_pipeline",
        recipes_server_url,
        *(
            f"base_model={MODEL_NAME}",
            "short_name=tiny",
            "batch_size=4",
            "rl_max_tokens=8",
            "max_steps=1",
            "eval_every=0",
        ),
    )

    root = recipes_directory.root / "runs" / "rlhf-tiny"
    assert {path.parent.name for path in root.glob("*/checkpoints.jsonl")} == {"sft", "rm", "rl"}


def test_prompt_distillation_creates_data(recipes_directory: Any, recipes_server_url: str) -> None:
    """The server has the hard-coded model name as an alias. The tiny model never answers in the requested form."""
    output = recipes_directory.run_module(
        "recipes.prompt_distillation.create_data",
        recipes_server_url,
        f"output_file={recipes_directory.root / 'created.jsonl'}",
    )
    assert "Loaded 2 sentences" in output and (recipes_directory.root / "created.jsonl").exists()


def test_chat_app(recipes_directory: Any, recipes_server_url: str, checkpoint: str) -> None:
    output = recipes_directory.run_module(
        "chat_app.tinker_chat_cli",
        recipes_server_url,
        *(
            f"base_model={MODEL_NAME}",
            f"model_path={checkpoint.replace('/weights/', '/sampler_weights/')}",
            "max_tokens=8",
        ),
        stdin="What is 4 + 5?\nn\nWhat is 2 + 2?\nquit\n",
    )
    assert output.count("Assistant: ") == 2 and "Error" not in output and "Goodbye" in output


def test_evaluations(recipes_directory: Any, recipes_server_url: str, checkpoint: str) -> None:
    """The GSM8K benchmark, both NLL evaluators, and the checkpoint manager."""
    path = checkpoint.replace("/weights/", "/sampler_weights/")
    results = json.loads(recipes_directory.run_program("evaluations.py", recipes_server_url, path).splitlines()[-1])
    assert results["benchmark"]["eval/gsm8k/num_examples"] == 4
    assert results["nll"] == pytest.approx(results["sampler_nll"], abs=1e-4)
    assert {"000001", "000002", "final"} <= set(results["checkpoints"])
    assert results["left"] == ["000002", "final"], "later rolling checkpoints delete earlier ones"


def test_run_inspect_evals(recipes_directory: Any, recipes_server_url: str, checkpoint: str) -> None:
    """The model and the renderer are read from the run that saved the checkpoint."""
    recipes_directory.run_module(
        "eval.run_inspect_evals",
        recipes_server_url,
        *(
            f"tasks={Path(__file__).parent / 'inspect_task.py'}@sums",
            "max_tokens=8",
            "num_choices=2",
            "seed=1",
            "top_k=8",
        ),
        *(f"model_path={checkpoint.replace('/weights/', '/sampler_weights/')}", "top_p=0.9", "temperature=0.6"),
    )

    assert list((recipes_directory.root / "runs" / "inspect-logs").iterdir())


def test_true_thinking_score(recipes_directory: Any, recipes_server_url: str) -> None:
    """Samples a chain of thought and scores its steps with compute_logprobs.

    The model name is hard-coded.
    """
    recipes_directory.run_module("recipes.true_thinking_score.run_small_experiment", recipes_server_url)
    (results,) = (recipes_directory.root / "runs").glob("tts-experiment*/**/tts_results.json")
    assert all("error" not in row for row in json.loads(results.read_text())["problems"])
