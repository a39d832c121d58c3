from pathlib import Path

import numpy as np

from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.apps.console.rendering import StaticFiles, load_templates
from skyrl_tx.apps.console.runs import describe_time, find_state, list_losses
from skyrl_tx.apps.console.samples import choose_step, describe_groups, make_decoder
from skyrl_tx.apps.history.breakdown import PARTS, Breakdown, Iteration
from skyrl_tx.apps.history.curves import OptimizerStep
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample
from skyrl_tx.apps.history.logged_metrics import choose_reward
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.server.settings import ApiSettings
from tests.support.tiny_tokenizer import PACKAGED


def test_states_and_rewards() -> None:
    assert [find_state("ready", at, 100.0) for at in (90.0, 10.0)] == ["training", "idle"]
    assert find_state("ready", 90.0, 100.0, has_finished=True) == "ended"
    assert find_state("unloaded", 0.0, 1.0) == "ended" and find_state("failed", 0.0, 1.0) == "failed"
    assert choose_reward(["a", "env/reward_std", "env/all/reward/total"]) == "env/all/reward/total"
    assert choose_reward(["a"]) is None


def test_the_samples_open_on_the_newest_step_that_was_taken() -> None:
    assert choose_step([72, 71, 70], 71) == 71, "72 is the evaluation at the end"
    assert choose_step([3, 1], 3) == 3 and choose_step([1], 0) == 1 and choose_step([], 5) == 0


def test_samples_are_shown_by_group_the_best_first() -> None:
    def make_sample(index: int, advantage: float | None) -> KeptSample:
        return KeptSample(
            sequence_id=f"r:{index}",
            tokens=np.array([1, 2], np.int32),
            logprobs=np.array([-1.0, -1.0], np.float32),
            stop_reason="stop",
            advantage=advantage,
            trainer_gap=None if advantage is None else 0.25,
        )

    kept = KeptGroup(
        request_id=RequestId("r"),
        model_id="m",
        step=1,
        owner="ann",
        prompt=np.array([7], np.int32),
        samples=(make_sample(0, -2.0), make_sample(1, 1.0), make_sample(2, None)),
    )
    (group,) = describe_groups([kept], lambda tokens: " ".join(f"<{token}>" for token in tokens))
    assert group.prompt == "<7>" and [sample.kept.advantage for sample in group.samples] == [1.0, -2.0, None]
    assert [sample.bar for sample in group.samples] == [0.5, -1.0, 0.0]
    assert [sample.kept.trainer_gap for sample in group.samples] == [0.25, 0.25, None]
    assert abs((group.samples[0].probability or 0) - 0.3679) < 1e-3

    (ids,) = describe_groups([kept], lambda tokens: None)
    assert ids.samples[0].text == "1 2" and not ids.is_text


def test_samples_are_decoded_by_the_tokenizer_of_the_model_if_there_is_one(tmp_path: Path) -> None:
    def decoder(model: Path):
        return make_decoder(ModelText(ApiSettings(data_dir=tmp_path, base_model=str(model))))

    decode = decoder(PACKAGED)
    tokens = ModelText(ApiSettings(data_dir=tmp_path, base_model=str(PACKAGED))).encode("2 + 2", add_special=False)
    assert decode([-1, *tokens]) == "2 + 2", "ids below 0 have no text"
    assert decode([2**32]) is None
    assert decoder(tmp_path)(tokens) is None


def test_the_loss_of_a_heading_is_of_the_last_completed_step() -> None:
    def make_step(loss: float, *, is_applied: bool = True) -> OptimizerStep:
        zeros = dict.fromkeys(("step", "at", "began_at", "passes", "tokens", "datums", "queue_s", "device_s"), 0)
        return OptimizerStep(**zeros, is_applied=is_applied, values={"loss": loss})

    steps = [make_step(3.0), make_step(2.0), make_step(1.0, is_applied=False)]
    assert list_losses(steps) == ("loss", [3.0, 2.0])
    assert list_losses(steps[2:]) == ("loss", [1.0]) and list_losses([]) == ("loss", [])


def test_the_time_of_a_run_is_drawn_as_a_stacked_bar_per_step() -> None:
    def make_iteration(step: int, client_s: float) -> Iteration:
        return Iteration(
            step=step,
            wall_s=10.0 + client_s,
            parts={**dict.fromkeys(PARTS, 0.0), "training": 10.0, "client": client_s},
            passes=1,
            datums=8,
            sample_requests=0,
            alone_s=0.0,
            tail_s=0.0,
        )

    def render(breakdown: Breakdown) -> str:
        page = '{% import "macros.jinja" as ui with context %}{% include "run_time.jinja" %}'
        return load_templates(StaticFiles.load()).from_string(page).render(describe_time(breakdown))

    breakdown = Breakdown(iterations=[make_iteration(step, 10.0 * step) for step in (1, 2, 3)], batch_fill=0.75)
    text = render(breakdown)
    assert '<rect class="training" x="0.0" y="90.0" width="213.33" height="30.0"/>' in text
    assert '<rect class="client" x="533.33" y="0.0" width="213.33" height="90.0"/>' in text
    assert "<title>Step 3: Sampling 0 ms, Training 10.0 s," in text and "highest bar took 40.0 s" in text
    assert "67% of the time no request of this run was open." in text and "Tokens in micro-batches: 75%" in text
    assert "Advice needs at least 3 steps." in render(Breakdown(iterations=[make_iteration(1, 10.0)]))
    assert "Nothing slows this run down" in render(
        Breakdown(iterations=[make_iteration(step, 0.0) for step in (1, 2, 3)])
    )
    assert "no times of this run" in render(Breakdown(iterations=[]))
