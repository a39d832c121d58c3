from collections.abc import Mapping

import pytest

from skyrl_tx.apps.history.breakdown import DeviceUser, sum_device_users
from skyrl_tx.apps.history.curves import OptimizerStep
from skyrl_tx.apps.history.hints import find_hints, find_slow_since
from skyrl_tx.apps.teams.usage import Total


def step(number: int, wall_s: float = 2.0, queue_s: float = 0.0, **values: float | None) -> OptimizerStep:
    return OptimizerStep(
        step=number,
        at=number * 10.0 + wall_s,
        began_at=number * 10.0,
        passes=1,
        tokens=1,
        datums=1,
        queue_s=queue_s,
        device_s=1.0,
        is_applied=True,
        values=values,
    )


GOOD: Mapping[str, float | None] = {
    "loss_sum": 1.0,
    "grad_norm": 1.0,
    "kl_to_sampler": 0.01,
    "clip_fraction": 0.1,
    "learning_rate": 1e-4,
    "nonzero_advantages": 8.0,
    "cut_share": 0.2,
    "surprise": 0.8,
}


def run(last: Mapping[str, float | None], times: int = 5) -> list[OptimizerStep]:
    return [step(number, **(GOOD if number <= 40 else {**GOOD, **last})) for number in range(1, 41 + times)]


def test_a_healthy_run_gives_no_hint() -> None:
    assert find_hints([], 0.0) == [] and find_hints(run({}), 500.0) == []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"loss_sum": None}, "loss was NaN or infinite in steps 41–45"),
        ({"grad_norm": None}, "gradient norm was NaN"),
        ({"nonzero_advantages": 0.0}, "All advantages were 0 in steps 41–45"),
        ({"grad_norm": 30.0}, "30 times its median"),
        ({"clip_fraction": 0.5}, "50% of the ratios are clipped"),
        ({"learning_rate": 0.0}, "learning rate is 0"),
        ({"cut_share": 0.75}, "75% of the samples of steps 41–45 were cut off by max_tokens"),
        ({"surprise": 0.04}, "mean -log p of sampled tokens is 0.04"),
    ],
)
def test_a_problem_of_the_newest_steps_is_reported(last: Mapping[str, float | None], words: str) -> None:
    (hint,) = find_hints(run(last), 500.0)
    assert words in hint.text and hint.advice and hint.step >= 41


def test_a_rising_divergence_is_reported_and_a_falling_one_is_not() -> None:
    rising = [step(number, kl_to_sampler=0.05 + number / 100) for number in range(1, 7)]
    falling = [step(number, kl_to_sampler=0.2 - number / 100) for number in range(1, 7)]
    assert "and rising" in find_hints(rising, 80.0)[0].text and find_hints(falling, 80.0) == []


def test_slow_steps_name_whom_they_wait_for() -> None:
    usual = [step(number) for number in range(1, 31)]
    waiting = [step(number, wall_s=6.0, queue_s=5.0) for number in range(31, 36)]
    working = [step(number, wall_s=6.0) for number in range(31, 36)]
    assert "wait for the device" in find_hints(usual + waiting, 400.0)[0].text
    assert "the requests take longer" in find_hints(usual + working, 400.0)[0].text


def test_one_batch_of_cut_or_certain_samples_is_no_hint() -> None:
    assert (
        find_hints(run({"cut_share": 0.6}, times=1), 500.0) == []
        and find_hints(run({"surprise": 0.0}, times=4), 500.0) == []
    )


def test_slow_steps_name_who_uses_the_device() -> None:
    usual = [step(number) for number in range(1, 31)]
    waiting = [step(number, wall_s=6.0, queue_s=5.0) for number in range(31, 36)]
    users = [DeviceUser("bob", 7.0), DeviceUser("ann's run b", 2.5), DeviceUser("cy", 0.5)]
    (hint,) = find_hints(usual + waiting, 400.0, users)
    assert "which is used by bob (70%), ann's run b (25%)." in hint.text
    assert find_slow_since(usual + waiting) == 310.0 and find_slow_since(usual) is None
    assert find_slow_since(usual + [step(number, wall_s=6.0) for number in range(31, 36)]) is None


def test_names_of_other_owners_are_for_those_who_may_see_them() -> None:
    def total(owner: str, model: str, device_s: float) -> Total:
        return Total(group=(owner, model), kind="training", tokens=1, requests=1, device_s=device_s)

    totals = [
        total("ann", "session-1:train:0", 9.0),
        total("ann", "session-1:train:1", 2.0),
        total("ann", "", 1.0),
        total("bob", "session-2:train:0", 3.0),
        total("cy", "session-3:train:0", 3.0),
        total("dan", "", 0.0),
    ]
    own = [DeviceUser("ann's run session-1:train:1", 2.0), DeviceUser("ann's samples of base weights", 1.0)]
    everyone = sum_device_users(totals, "session-1:train:0", "ann", lambda _: True)
    assert everyone == [DeviceUser("bob", 3.0), DeviceUser("cy", 3.0), *own]
    seen_by_ann = sum_device_users(totals, "session-1:train:0", "ann", lambda owner: owner == "ann")
    assert seen_by_ann == [DeviceUser("other owners", 6.0), *own]


def test_passes_without_a_step_are_reported_after_half_an_hour() -> None:
    last = OptimizerStep(
        step=2, at=20.0, began_at=19.0, passes=3, tokens=1, datums=1, queue_s=0, device_s=0, is_applied=False
    )
    assert find_hints([step(1), last], 100.0) == []
    (hint,) = find_hints([step(1), last], 1830.0)
    assert (
        "Step 2 has 3 forward_backward requests but no optim_step, and its last request ended 30 minutes ago"
        in hint.text
    )


def test_a_policy_gradient_run_without_reward_says_how_to_log_it() -> None:
    steps = run({})
    (hint,) = find_hints(steps, 500.0, has_reward=False)
    assert hint.level == "note" and "TRACKIO_SERVER_URL" in hint.advice and "TRACKIO_WRITE_TOKEN" in hint.advice
    assert find_hints([step(number, grad_norm=1.0) for number in range(1, 9)], 80.0, has_reward=False) == []


def test_errors_come_first() -> None:
    found = find_hints(run({"loss_sum": None, "learning_rate": 0.0}), 500.0)
    assert [hint.level for hint in found] == ["error", "warning"]
