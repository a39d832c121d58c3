"""Device time is attributed to the requests whose work ran on the device."""

from skyrl_tx.engine.activity import DeviceClock, DeviceTime


class Device:
    """A device that runs work in order. Dispatch calls return before the work is done."""

    def __init__(self) -> None:
        self.now = self.ready_at = 0.0
        self.clock = DeviceClock(lambda: self.now)

    def dispatch(self, taken: DeviceTime, seconds: float) -> None:
        with self.clock.measure_dispatch(taken):
            self.ready_at = max(self.now, self.ready_at) + seconds

    def complete(self, taken: DeviceTime) -> None:
        with self.clock.measure_completion(taken):
            self.now = max(self.now, self.ready_at)


def test_a_call_that_dispatches_and_waits_is_counted_once() -> None:
    device, sample, trained, step = Device(), DeviceTime("slice"), DeviceTime("pass"), DeviceTime("step")
    for _ in range(3):
        with device.clock.measure_call(sample):
            device.now += 2.0
    device.dispatch(trained, 1.0)
    device.complete(trained)
    assert (sample.device_s, trained.device_s) == (6.0, 1.0), "not the time of the last slice again"
    with device.clock.measure_call(step):
        device.now += 0.5
    assert step.device_s == 0.5


def test_a_call_pays_for_itself_while_other_work_is_dispatched() -> None:
    device, trained, step = Device(), DeviceTime("pass"), DeviceTime("step")
    device.dispatch(trained, 1.0)
    with device.clock.measure_call(step):
        device.ready_at += 1.0
        device.now = device.ready_at
    assert (trained.device_s, step.device_s) == (1.0, 1.0)


def test_a_call_that_waits_for_the_work_of_others_does_not_pay_for_it() -> None:
    device, ann, bob = Device(), DeviceTime("pass"), DeviceTime("pass")
    for _ in range(10):
        for taken in (ann, ann, ann, bob):
            device.dispatch(taken, 0.5)
        device.complete(bob)
    assert (ann.device_s, bob.device_s) == (15.0, 5.0)


def test_kinds_of_work_are_divided_by_what_each_takes_alone() -> None:
    device, first = Device(), DeviceTime("pass")
    for seconds in (30.0, 1.0):  # the first pass includes compilation
        device.dispatch(first, seconds)
        device.complete(first)
    device.complete(DeviceTime("slice"))
    alone = DeviceTime("slice")
    device.dispatch(alone, 0.25)
    device.complete(alone)
    trained, sampled = DeviceTime("pass"), DeviceTime("slice")
    for _ in range(4):
        device.dispatch(trained, 1.0)
        device.dispatch(sampled, 0.25)
        device.complete(sampled)
    assert abs(trained.device_s - 4.0) < 1e-9 and abs(sampled.device_s - 1.0) < 1e-9


def test_as_many_slices_as_take_the_time_of_a_long_micro_batch() -> None:
    device = Device()
    for kind, seconds, expected in ("pass", 8.0, 1), ("slice", 1.5, 5), ("pass", 0.09, 1):
        work = DeviceTime(kind)
        device.dispatch(work, seconds)
        device.complete(work)
        assert device.clock.count_slices_per_micro_batch() == expected


def test_work_that_is_done_when_its_call_returns_is_counted_at_once() -> None:
    device, taken = Device(), DeviceTime("step")
    with device.clock.measure_completion(taken):
        device.now += 2.0
    assert taken.device_s == 2.0


def test_time_is_counted_once_if_a_call_fails() -> None:
    device, failed, next_one = Device(), DeviceTime("pass"), DeviceTime("pass")
    device.dispatch(failed, 1.0)
    try:
        with device.clock.measure_completion(failed):
            device.now += 1.0
            raise ValueError
    except ValueError:
        pass
    with device.clock.measure_completion(next_one):
        device.now += 2.0
    assert (failed.device_s, next_one.device_s) == (1.0, 2.0)
