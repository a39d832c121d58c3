"""Every recipe of the cookbook that can run offline, unmodified and with its own defaults, against one live server.

Steps, batches and lengths are cut down; a recipe that takes its model, teacher or judge as an argument is given ours.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MODEL_NAME = "Qwen/Qwen3-8B"
Metrics = list[dict[str, Any]]


def values(metrics: Metrics, name: str) -> list[float]:
    return [row[name] for row in metrics if name in row]


def learned(metrics: Metrics) -> None:
    """Supervised training lowered its loss."""
    losses = values(metrics, "train_mean_nll")
    assert len(losses) >= 2 and losses[-1] < losses[0]


def scored(metrics: Metrics) -> None:
    """It learned, and what was held out was scored by a sampler of each evaluation."""
    learned(metrics)
    scores = values(metrics, "test/nll")
    assert len(scores) >= 2 and scores[-1] < scores[0]


def on_policy(metrics: Metrics) -> None:
    """What the first step is trained on was sampled from the weights it trains: both sides agree on each token."""
    assert abs(values(metrics, "optim/kl_sample_train_v2")[0]) < 1e-6


def reinforced(metrics: Metrics) -> None:
    """Rewards differed, so that there was something to learn, on policy."""
    on_policy(metrics)
    assert max(values(metrics, "unclipped_grad_l2:mean")) > 0


def preferred(metrics: Metrics) -> None:
    """The reference is the policy at first; then it learns to tell the pairs apart."""
    losses = values(metrics, "dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0] and values(metrics, "accuracy")[-1] > 0.5


def distilled(metrics: Metrics) -> None:
    """Student and teacher are the same model: no distance, no gradient."""
    on_policy(metrics)
    assert values(metrics, "teacher_kl") == pytest.approx([0.0], abs=1e-5)


def self_distilled(metrics: Metrics) -> None:
    """The teacher has seen the answer, so the student has something to learn."""
    assert values(metrics, "sdft/mean_teacher_entropy")[0] > 0
    assert values(metrics, "unclipped_grad_l2:mean")[0] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One of the cookbook's programs: its module, what is cut down, and what its metrics must show.

    `{taught}` in an argument becomes the checkpoint of chat_sl.
    """

    module: str
    arguments: tuple[str, ...]
    check: Callable[[Metrics], None]


NO_EVALS = "eval_every=0"
FROM_TAUGHT = "load_checkpoint_path={taught}"
SHORT = ("max_tokens=16", "max_steps=1", NO_EVALS)

RECIPES = {
    "sl_basic": Recipe(module="sl_basic", arguments=("num_epochs=3", "eval_every=2"), check=scored),
    "off_policy_reasoning": Recipe(
        module="distillation.off_policy_reasoning",
        arguments=("batch_size=8", "max_prompts=64", "buffer_size=64", "max_steps=3", NO_EVALS),
        check=learned,
    ),
    "prompt_distillation": Recipe(
        module="prompt_distillation.train",
        arguments=("file_path=chats.jsonl", "batch_size=16", "max_steps=3", "learning_rate=1e-3"),
        check=learned,
    ),
    "rl_basic": Recipe(module="rl_basic", arguments=("max_tokens=16", FROM_TAUGHT), check=reinforced),
    "math_rl arithmetic": Recipe(
        module="math_rl.train",
        arguments=("groups_per_batch=8", "max_steps=2", "eval_every=1", "compute_post_kl=True", FROM_TAUGHT),
        check=reinforced,
    ),
    "math_rl gsm8k": Recipe(
        module="math_rl.train",
        arguments=(
            *("env=gsm8k", "groups_per_batch=8", "group_size=16", "max_tokens=16", "max_steps=1", "eval_every=1"),
            FROM_TAUGHT,
        ),
        check=reinforced,
    ),
    "math_rl stream_minibatch": Recipe(
        module="math_rl.train",
        arguments=(
            *("groups_per_batch=8", "max_steps=2", NO_EVALS, FROM_TAUGHT),
            *("stream_minibatch_config.groups_per_batch=8", "stream_minibatch_config.num_minibatches=2"),
        ),
        check=reinforced,
    ),
    "math_rl async": Recipe(
        module="math_rl.train",
        arguments=("groups_per_batch=8", "max_steps=2", NO_EVALS, "max_steps_off_policy=1", FROM_TAUGHT),
        check=reinforced,
    ),
    "dpo": Recipe(module="preference.dpo.train", arguments=("batch_size=8", "max_steps=3"), check=preferred),
    "shorter": Recipe(module="preference.shorter.train", arguments=("batch_size=4", *SHORT), check=reinforced),
    "on_policy_distillation": Recipe(
        module="distillation.on_policy_distillation",
        arguments=(f"teacher_model={MODEL_NAME}", "groups_per_batch=4", *SHORT),
        check=distilled,
    ),
    "on_policy_multi_teacher": Recipe(
        module="distillation.on_policy_multi_teacher",
        arguments=(
            *(f"deepmath_teacher_model={MODEL_NAME}", f"tulu3_teacher_model={MODEL_NAME}", FROM_TAUGHT),
            *("deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2", *SHORT),
        ),
        check=reinforced,
    ),
    "sdft": Recipe(module="sdft.train", arguments=("groups_per_batch=4", *SHORT), check=self_distilled),
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
        check=on_policy,
    ),
    "guess_number": Recipe(
        module="multiplayer_rl.guess_number.train",
        arguments=("group_size=2", "batch_size=1", "max_tokens=8", "max_steps=1", NO_EVALS),
        check=on_policy,
    ),
    "twenty_questions": Recipe(
        module="multiplayer_rl.twenty_questions.train",
        arguments=("group_size=2", "batch_size=1", "max_tokens=8", "max_steps=1", NO_EVALS),
        check=on_policy,
    ),
    "rl_numerics_check": Recipe(
        module="rl_numerics_check.train",
        arguments=("group_size=2", "groups_per_batch=1", "max_tokens=32", "max_trajectory_tokens=4096", "max_steps=1"),
        check=on_policy,
    ),
}


@pytest.fixture(scope="module")
def taught(furnished: Any, long_server: str) -> str:
    """Give a checkpoint that knows the form of answers to sums and to GSM8K's questions, and some of them by heart."""
    metrics = furnished.run(
        "chat_sl.train",
        long_server,
        *("dataset=lessons.jsonl", "batch_size=32", "learning_rate=1e-2", "num_epochs=4"),
        *("save_every=5", "rolling_save_every=2"),
    )
    learned(metrics)
    return furnished.last_checkpoint("chat_sl.train")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_to_its_end(furnished: Any, long_server: str, taught: str, name: str) -> None:
    recipe = RECIPES[name]
    arguments = [argument.replace("{taught}", taught) for argument in recipe.arguments]
    metrics = furnished.run(recipe.module, long_server, *arguments, log=name)
    recipe.check(metrics)
    steps = [row["step"] for row in metrics]
    assert all(isinstance(step, int) for step in steps) and steps[0] == 0 and steps == sorted(steps), (
        "steps are the recipe's own: it finds rows by them when it resumes, and no metric of ours has that name"
    )
    assert furnished.last_checkpoint(name).startswith("tinker://")


def test_the_pipeline_of_rlhf(furnished: Any, long_server: str) -> None:
    """Supervised training, a reward model out of comparisons, then a tournament that it judges."""
    furnished.run_module(
        "recipes.preference.rlhf.rlhf_pipeline",
        long_server,
        *(
            f"base_model={MODEL_NAME}",
            "short_name=tiny",
            "batch_size=4",
            "rl_max_tokens=8",
            "max_steps=1",
            "eval_every=0",
        ),
    )
    root = furnished.root / "runs" / "rlhf-tiny"
    assert {path.parent.name for path in root.glob("*/checkpoints.jsonl")} == {"sft", "rm", "rl"}


def test_data_for_prompt_distillation_are_sampled(furnished: Any, long_server: str) -> None:
    """It insists on a model of its own: one more name of ours. A tiny model never answers in the form asked for."""
    said = furnished.run_module(
        "recipes.prompt_distillation.create_data", long_server, f"output_file={furnished.root / 'made.jsonl'}"
    )
    assert "Loaded 2 sentences" in said and (furnished.root / "made.jsonl").exists()


def test_a_chat(furnished: Any, long_server: str, taught: str) -> None:
    said = furnished.run_module(
        "chat_app.tinker_chat_cli",
        long_server,
        *(f"base_model={MODEL_NAME}", f"model_path={taught.replace('/weights/', '/sampler_weights/')}", "max_tokens=8"),
        stdin="What is 4 + 5?\nn\nWhat is 2 + 2?\nquit\n",
    )
    assert said.count("Assistant: ") == 2 and "Error" not in said and "Goodbye" in said


def test_evaluations(furnished: Any, long_server: str, taught: str) -> None:
    """GSM8K as benchmark and through inspect, both NLL evaluators, the checkpoint manager."""
    path = taught.replace("/weights/", "/sampler_weights/")
    seen = json.loads(furnished.run_program("evaluations.py", long_server, path).splitlines()[-1])
    assert seen["benchmark"]["eval/gsm8k/num_examples"] == 4
    assert seen["nll"] == pytest.approx(seen["sampler_nll"], abs=1e-4)
    assert {"000001", "000002", "final"} <= set(seen["checkpoints"])
    assert seen["left"] == ["000002", "final"], "rolling checkpoints are deleted by those that follow"


def test_run_inspect_evals(furnished: Any, long_server: str, taught: str) -> None:
    """Model and renderer come from what the server keeps of the run that saved the checkpoint."""
    furnished.run_module(
        "eval.run_inspect_evals",
        long_server,
        *(
            f"tasks={Path(__file__).parent / 'inspect_task.py'}@sums",
            "max_tokens=8",
            "num_choices=2",
            "seed=1",
            "top_k=8",
        ),
        *(f"model_path={taught.replace('/weights/', '/sampler_weights/')}", "top_p=0.9", "temperature=0.6"),
    )
    assert list((furnished.root / "runs" / "inspect-logs").iterdir())


def test_true_thinking_score(furnished: Any, long_server: str) -> None:
    """It samples a chain of thought and scores its steps by compute_logprobs, with a model that it insists on."""
    furnished.run_module("recipes.true_thinking_score.run_small_experiment", long_server)
    (results,) = (furnished.root / "runs").glob("tts-experiment*/**/tts_results.json")
    assert all("error" not in row for row in json.loads(results.read_text())["problems"])
