"""Twelve loops with one planted bottleneck each, and three loops without one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from skyrl_tx.apps.history.breakdown import Breakdown, Compiling, DeviceUser, split_iterations
from skyrl_tx.apps.history.hints import find_advice
from skyrl_tx.apps.history.timeline import TimelineSpan

STEPS = 8


@dataclass
class Loop:
    """A client that sends requests. `now` is the time on its clock."""

    now: float = 1000.0
    spans: list[TimelineSpan] = field(default_factory=list)
    num_steps: int = 0

    def request(
        self, name: str, seconds: float, *, queued_s: float = 0.0, device_s: float = 0.0, **values: Any
    ) -> None:
        """Add a request that arrives now. The clock does not move."""
        started = self.now + queued_s
        span = TimelineSpan(
            name=name,
            created_at=self.now,
            started_at=started,
            ended_at=started + seconds,
            device_s=device_s,
            annotations=values,
        )
        self.spans.append(span)

    def sample(self, *lengths_s: float) -> None:
        """Send sample requests together, and wait for all of them."""
        for seconds in lengths_s:
            self.request("sample", seconds)
        self.now += max(lengths_s)

    def train(self, seconds: float, *, datums: int = 64, queued_s: float = 0.0, device_s: float | None = None) -> None:
        """Send a forward_backward request, and wait for it."""
        device_s = 0.95 * seconds if device_s is None else device_s
        self.request("forward_backward", seconds, queued_s=queued_s, device_s=device_s, datums=datums)
        self.now += queued_s + seconds

    def step(self) -> None:
        self.num_steps += 1
        self.request("optim_step", 0.2, device_s=0.2, step=self.num_steps)
        self.now += 0.2

    def save(self, seconds: float = 0.3) -> None:
        self.request("save_weights", seconds)
        self.now += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds


def repeat(iteration: Callable[[Loop], None]) -> list[TimelineSpan]:
    loop = Loop()
    for _ in range(STEPS):
        iteration(loop)
    return loop.spans


def describe(spans: Sequence[TimelineSpan], **known: Any) -> Breakdown:
    return Breakdown(iterations=split_iterations(spans), **known)


def rl(
    loop: Loop, *, reward_s: float = 0.5, save_s: float = 0.3, lengths_s: Sequence[float] = (), **train: Any
) -> None:
    """One iteration of RL: 6 s of sampling, 4 s of training, and little else."""
    loop.save(save_s)
    loop.sample(*(lengths_s or [3.0 + 0.1 * index for index in range(31)]))
    loop.wait(reward_s)
    loop.train(4.0, **train)
    loop.step()


def slow_reward() -> Breakdown:
    return describe(repeat(lambda loop: rl(loop, reward_s=40.0)))


def slow_data() -> Breakdown:
    def iteration(loop: Loop) -> None:
        loop.wait(3.0)
        loop.train(2.0)
        loop.wait(1.0)
        loop.step()

    return describe(repeat(iteration))


def busy_device() -> Breakdown:
    users = [DeviceUser("bob", 90.0), DeviceUser("carol", 10.0)]
    return describe(repeat(lambda loop: rl(loop, queued_s=20.0)), other_users=users)


def two_runs() -> Breakdown:
    spans = repeat(lambda loop: rl(loop, lengths_s=[2.0] * 8, device_s=1.0))
    return Breakdown(iterations=split_iterations(spans, others_share=0.7), other_users=[DeviceUser("bob", 50.0)])


def new_shapes() -> Breakdown:
    loop = Loop()
    compiling: list[Compiling] = []
    for number in range(STEPS):
        if number % 4 == 3:
            rl(loop)
            continue
        loop.save()
        loop.sample(*[4.0 + 0.1 * index for index in range(20)])
        began = loop.now
        loop.train(14.0, device_s=14.0)
        compiling.append(Compiling(began, loop.now, 10.0))
        loop.step()
    return Breakdown(iterations=split_iterations(loop.spans, compiling))


def slow_save() -> Breakdown:
    return describe(repeat(lambda loop: rl(loop, save_s=15.0)))


def single_samples() -> Breakdown:
    return describe(repeat(lambda loop: rl(loop, lengths_s=[8.0] * 16)), has_single_samples=True)


def one_by_one() -> Breakdown:
    def iteration(loop: Loop) -> None:
        for _ in range(12):
            loop.sample(1.0)
        loop.train(4.0)
        loop.step()

    return describe(repeat(iteration))


def stragglers() -> Breakdown:
    return describe(repeat(lambda loop: rl(loop, lengths_s=[*[3.0 + 0.1 * index for index in range(30)], 20.0])))


def empty_rows() -> Breakdown:
    return describe(repeat(lambda loop: rl(loop, lengths_s=[20.0, 19.0])), decode_fill=0.03)


def small_passes() -> Breakdown:
    def iteration(loop: Loop) -> None:
        for _ in range(32):
            loop.train(0.3, datums=1)
        loop.step()

    return describe(repeat(iteration))


def padding() -> Breakdown:
    def iteration(loop: Loop) -> None:
        loop.train(3.0, datums=6)
        loop.step()

    return describe(repeat(iteration), batch_fill=0.3)


@pytest.mark.parametrize(
    ("loop", "words", "advice"),
    [
        (slow_reward, "79% of the time no request of this run was open", "Send the next batch"),
        (slow_data, "62% of the time no request of this run was open", "Prepare the next batch"),
        (busy_device, "65% of the time requests of this run waited for the device, used by bob (90%)", "weight"),
        (two_runs, "waited for the device, used by bob (100%)", "weight"),
        (new_shapes, "waited for the compiler", "similar lengths"),
        (slow_save, "58% of the time this run saved or loaded weights", "less often"),
        (single_samples, "16 sample requests per step with one sample each", "num_samples=16"),
        (one_by_one, "The 12 sample requests of a step ran one after another, for 74% of the time", "Send all of them"),
        (stragglers, "57% of the time only the last few sample requests", "max_tokens"),
        (empty_rows, "Only 3% of the decode rows", "larger groups"),
        (small_passes, "32 forward_backward requests per step for 32 examples", "in one request"),
        (padding, "Micro-batches were only 30% full", "more examples"),
    ],
)
def test_a_planted_bottleneck_is_named_first(loop: Callable[[], Breakdown], words: str, advice: str) -> None:
    found = find_advice(loop())
    assert words in found[0].text and advice in found[0].advice


def balance_parts() -> Breakdown:
    return describe(repeat(rl), decode_fill=0.6, batch_fill=0.9)


def send_ahead() -> Breakdown:
    """SFT whose client sends two requests ahead."""
    loop = Loop()
    for _ in range(STEPS):
        loop.request("forward_backward", 4.0, queued_s=4.3, device_s=3.9, datums=64)
        loop.request("optim_step", 0.2, queued_s=8.3, device_s=0.2, step=1)
        loop.wait(4.3)
    return describe(loop.spans, batch_fill=0.8)


def asynchronous() -> Breakdown:
    """RL that samples all the time while it trains."""
    loop = Loop()
    for _ in range(STEPS):
        for index in range(16):
            loop.request("sample", 9.0 + 0.1 * index)
        loop.train(4.0, device_s=2.5)
        loop.step()
        loop.wait(3.0)
    return describe(loop.spans, decode_fill=0.4, batch_fill=0.9)


@pytest.mark.parametrize("loop", [balance_parts, send_ahead, asynchronous])
def test_a_loop_without_a_bottleneck_gets_no_advice(loop: Callable[[], Breakdown]) -> None:
    assert find_advice(loop()) == []


def test_two_iterations_are_too_few_for_advice() -> None:
    breakdown = slow_reward()
    assert find_advice(Breakdown(iterations=breakdown.iterations[:2])) == []
