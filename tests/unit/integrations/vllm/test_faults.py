"""Sampling when a vLLM server rejects requests, loses adapters, stops or hangs."""

import json
import logging
import re
import time

import pytest

from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.contract.meters import Meters
from tests.support.vllm_world import World, begin, draw, get_tokens, request, until


def test_an_adapter_that_a_server_forgot_is_loaded_again(world: World):
    stub = world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    before = get_tokens(draw(sampler, request(sampler="s")))
    assert len(before) == 12 and before != get_tokens(draw(sampler, request()))
    stub.forget_adapters()
    both = draw(sampler, request("one", sampler="s"), request("two", sampler="s"))
    assert get_tokens(both, "one") == get_tokens(both, "two") == before
    assert len(stub.loads) == 2 and len(set(stub.loads)) == 1  # one call for both samples


def test_an_adapter_that_a_server_has_already_is_no_error(world: World):
    stub = world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    before = draw(sampler, request(sampler="s"))
    for server in sampler._servers:  # simulates a call that was cut off
        server.forget_adapter(stub.loads[0])
    assert get_tokens(draw(sampler, request(sampler="s"))) == get_tokens(before)


def test_an_adapter_that_a_server_cannot_keep_fails_the_sample(world: World):
    stub = world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    stub.options.fail_next = [(404, "The model `x` does not exist.")] * 2
    [failed] = draw(sampler, request(sampler="s"))
    assert failed.error is not None and "does not keep the adapter" in failed.error


def test_an_adapter_that_a_server_refuses_fails_its_samples_only(world: World):
    world.stub(max_lora_rank=2)
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    deltas = draw(sampler, request("bad", sampler="s"), request("good"))
    [error] = [delta.error for delta in deltas if delta.error]
    assert "cannot be loaded (HTTP 500)" in error and "LoRA rank 4 is greater than 2" in error
    assert len(get_tokens(deltas, "good")) == 12


def test_a_dropped_adapter_is_unloaded_and_its_files_are_removed(world: World):
    stub = world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    draw(sampler, request(sampler="s"))
    [path] = stub.adapters.values()
    assert sorted(file.name for file in world.list_files(path)) == ["adapter_config.json", "adapter_model.safetensors"]
    sampler.drop_sampler(SamplerId("s"))
    sampler.drop_sampler(SamplerId("s"))
    world.wait(lambda: not stub.adapters and not world.list_files(path))


def test_no_more_adapters_than_places(world: World):
    world.stub()
    sampler = world.sampler(max_adapters=1)
    adapter = world.adapter()
    sampler.load_sampler(SamplerId("s"), adapter)
    sampler.load_sampler(SamplerId("s"), adapter)
    with pytest.raises(CapacityError, match="all 1 adapter slots"):
        sampler.load_sampler(SamplerId("other"), adapter)


def test_a_refused_sample_fails_with_the_reason_and_others_go_on(world: World):
    stub = world.stub()
    sampler = world.sampler()
    stub.options.fail_next = [(400, "stop_token_ids are too many")]
    deltas = draw(sampler, request("bad"), request("good"))
    [error] = [delta.error for delta in deltas if delta.error]
    assert error == f"vLLM at {stub.url} refused the sample: HTTP 400: stop_token_ids are too many"
    assert [delta.stop_reason for delta in deltas if delta.stop_reason] == ["length"]


def test_what_vllm_cannot_sample_is_refused_before_anything_starts(world: World):
    stub = world.stub()
    sampler = world.sampler()
    num_bodies = len(stub.bodies)
    with pytest.raises(UserError, match="top_k 3"):
        begin(sampler, request("good"), request("bad", top_k=3))
    assert sampler.step_sample() == [] and len(stub.bodies) == num_bodies


@pytest.mark.parametrize("after", [1, 5, 11])
def test_a_dropped_sample_begins_again_and_brings_no_token_twice(world: World, after: int):
    stub = world.stub()
    sampler = world.sampler()
    whole = draw(sampler, request())
    stub.options.drop_after = [after, after]
    again = draw(sampler, request())
    assert get_tokens(again) == get_tokens(whole) and again[-1].stop_reason == "length"
    assert [float(logprob) for delta in again for logprob in delta.logprobs] == pytest.approx(
        [float(logprob) for delta in whole for logprob in delta.logprobs]
    )


def test_a_dropped_sample_that_does_not_repeat_fails_clearly(world: World):
    stub = world.stub()
    sampler = world.sampler()
    stub.options.drop_after, stub.options.other_seeds = [6], [0, 1]
    deltas = draw(sampler, request())
    assert len(get_tokens(deltas)) == 6
    assert deltas[-1].error is not None and "the same seed gave other tokens on" in deltas[-1].error


def test_a_sample_does_not_begin_again_without_end(world: World):
    stub = world.stub()
    sampler = world.sampler(max_restarts=2)
    stub.options.drop_after = [3] * 5
    deltas = draw(sampler, request())
    assert deltas[-1].error is not None and "the sample was started 3 times and did not end" in deltas[-1].error
    assert len(stub.options.drop_after) == 2


def test_an_error_of_the_server_in_a_stream_is_tried_again(world: World):
    stub = world.stub()
    sampler = world.sampler()
    stub.options.error_events = 2
    assert len(get_tokens(draw(sampler, request()))) == 12


def test_samples_wait_for_a_server_that_is_lost(world: World):
    """The server comes back without adapters."""
    stub = world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    before = get_tokens(draw(sampler, request(sampler="s")))
    stub.stop()
    begin(sampler, request(sampler="s"))
    assert all(not delta.tokens.size and delta.error is None for delta in sampler.step_sample())
    stub.start()
    assert get_tokens(until(sampler, lambda _: False)) == before


def test_samples_fail_when_a_server_stays_away_and_work_when_it_is_back(world: World):
    stub = world.stub()
    sampler = world.sampler(outage_timeout_s=0.2)
    stub.stop()
    [failed] = draw(sampler, request())
    assert failed.error is not None
    assert (
        failed.error.startswith("no vLLM server could draw the sample for ")
        and "does not respond: ConnectError" in failed.error
    )
    stub.start()
    assert len(get_tokens(draw(sampler, request()))) == 12


def test_a_lost_server_is_reported_before_a_sample_needs_it(world: World, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "skyrl_tx.integrations.vllm")
    stub, other = world.stub(), world.stub()
    sampler = world.sampler(lost_after_s=0.05)
    assert sampler.meters(Meters()) == Meters(sampler_servers=2, sampler_servers_lost=0)

    stub.stop()
    world.wait(lambda: sampler.meters(Meters()).sampler_servers_lost)
    found = sampler.meters(Meters())
    assert found.outage is not None and not sampler.is_away
    assert re.fullmatch(
        r"1 of 2 vLLM servers have not responded for \d+ s \(\w+\); the other servers draw all samples", found.outage
    )

    other.stop()
    world.wait(lambda: sampler.is_away)
    stub.start()
    other.start()
    world.wait(lambda: sampler.meters(Meters()).outage is None)
    world.wait(lambda: f"vLLM at {stub.url} is back" in caplog.text)
    assert f"vLLM at {stub.url} does not respond" in caplog.text and "training continues" in caplog.text


def test_a_silent_server_is_a_lost_one(world: World):
    stub = world.stub()
    sampler = world.sampler(silence_timeout_s=0.2, outage_timeout_s=0.1)
    stub.options.is_paused = True
    [failed] = draw(sampler, request())
    assert failed.error is not None and "did not respond in time (ReadTimeout)" in failed.error


def test_another_server_takes_the_samples_of_a_lost_one(world: World):
    stubs = world.stub(), world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    expected = [get_tokens(draw(sampler, request(sampler="s", seed=seed))) for seed in range(4)]
    stubs[0].stop()
    assert [get_tokens(draw(sampler, request(sampler="s", seed=seed))) for seed in range(4)] == expected


def test_two_servers_share_samples_and_a_prompt_stays_with_one_as_long_as_it_has_room(world: World):
    stubs = world.stub(), world.stub()
    sampler = world.sampler()
    before = [len(stub.bodies) for stub in stubs]
    for number in range(4):  # one after the other
        draw(sampler, request(seed=number))
    alone = sorted(len(stub.bodies) - count for stub, count in zip(stubs, before, strict=True))
    assert alone == [0, 4]
    draw(sampler, *(request(f"r{number}") for number in range(12)))
    at_once = [len(stub.bodies) - count for stub, count in zip(stubs, before, strict=True)]
    assert min(at_once) >= 4


def test_cancelling_ends_the_stream_on_the_server(world: World):
    stub = world.stub()
    sampler = world.sampler()
    num_bodies = len(stub.bodies)
    stub.options.is_paused = True
    begin(sampler, request("gone"), request("ended"))
    world.wait(lambda: len(stub.bodies) == num_bodies + 2)
    sampler.cancel_sample([request("gone").request_id])
    sampler.end_sample(request("ended").request_id, 0)
    assert sampler.step_sample() == []
    world.wait(lambda: len(stub.aborted) == 2)


def test_closing_ends_everything(world: World):
    stub = world.stub()
    sampler = world.sampler()
    sampler.load_sampler(SamplerId("s"), world.adapter())
    draw(sampler, request(sampler="s"))
    stub.options.is_paused = True
    begin(sampler, request())
    started = time.monotonic()
    sampler.close()
    sampler.close()
    assert time.monotonic() - started < 5
    assert not [path for path in world.directory.iterdir() if path.name.startswith("skyrl_tx-")]


def test_a_prompt_of_one_scope_is_salted_apart_from_another(world: World):
    stub = world.stub()
    sampler = world.sampler()
    for scope in ("", "ann", "bob", "ann"):
        draw(sampler, world.set_scope(request(), scope))
    salts = [body.get("cache_salt") for body in stub.bodies[-4:]]
    assert salts[0] is None and salts[1] == salts[3] != salts[2]
    assert "ann" not in json.dumps(stub.bodies)
