"""Startup errors name the features that a server lacks."""

import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.integrations.vllm import VllmConfig
from skyrl_tx.integrations.vllm.adapter_files import AdapterDirectory
from skyrl_tx.integrations.vllm.sampler import VllmSampler
from skyrl_tx.testing.fake.model import log_softmax, logits
from tests.support.vllm_world import World, draw, get_tokens, request


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_scale_out": False}, r"/inference/v1/generate: start it with --enable-scale-out"),
        ({"lora_routes": False}, r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and add --enable-lora"),
        ({"logprobs_mode": "raw_logits"}, r"logits: start it with --logprobs-mode processed_logprobs or raw_logprobs"),
        ({"max_logprobs": 1}, r"--max-logprobs 21"),
        ({"api_key": "secret"}, r"check that this is a vLLM server"),
    ],
)
def test_what_a_server_lacks_is_named(world: World, options: dict[str, object], message: str):
    stub = world.stub(**options)
    with pytest.raises(UserError, match=message) as raised:
        world.sampler()
    assert stub.url in str(raised.value)


def test_a_server_with_a_key_is_used_with_it(world: World):
    world.stub(api_key="secret")
    sampler = world.sampler(api_key="secret")
    assert draw(sampler, request())[-1].stop_reason == "length"
    assert "secret" not in repr(world.config(api_key="secret"))


def test_capabilities_are_the_smaller_ones_of_all_servers(world: World, caplog: pytest.LogCaptureFixture):
    world.stub(max_model_len=48)
    world.stub(max_logprobs=5)
    sampler = VllmSampler("tiny", world.config(max_samples=12, max_adapters=3))
    with caplog.at_level(logging.WARNING):
        both = sampler.start(world.capabilities)
    sampler.close()
    assert (both.max_context_length, both.max_sample_tokens) == (48, 48)
    assert (both.sample_slots, both.max_samplers) == (12, 3)
    assert (both.max_topk_logprobs, both.max_alt_tokens, both.offers_target_logprobs) == (4, 0, False)
    assert both.max_models == world.capabilities.max_models and both.losses == world.capabilities.losses
    assert "--max-model-len" in caplog.text and "--max-logprobs 21" in caplog.text


def test_the_mode_of_the_servers_decides_which_logprobs_samples_have(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def start(sampler: VllmSampler) -> Collection[str]:
        try:
            return sampler.start(world.capabilities).sampled_logprobs
        finally:
            sampler.close()

    world.stub()
    assert start(VllmSampler("tiny", world.config())) == {"tempered"}
    world.stubs.clear()
    world.stub(logprobs_mode="raw_logprobs")
    with caplog.at_level(logging.WARNING):
        assert start(VllmSampler("tiny", world.config())) == {"raw"}
    assert "--sampled-logprobs raw" in caplog.text

    # vLLM computes raw log-probabilities before all filters.
    sample = request(temperature=0.5, top_k=4, top_p=0.8, raw_logprobs=True)
    deltas = draw(world.sampler(), sample)
    tokens = np.array(get_tokens(deltas))
    previous = np.append(sample.prompt[-1], tokens[:-1]).astype(np.int32)
    rows = log_softmax(logits(previous, None, world.capabilities.vocab_size))
    found = np.concatenate([delta.logprobs for delta in deltas])
    np.testing.assert_allclose(found, rows[np.arange(tokens.size), tokens], rtol=0, atol=1e-6)

    world.stub()
    with pytest.raises(UserError, match="set the same --logprobs-mode"):
        world.sampler()


def test_a_server_without_a_base_model_is_named(world: World):
    stub = world.stub(max_model_len=0)
    with pytest.raises(UserError, match=f"vLLM at {stub.url} serves no base model"):
        world.sampler()


def test_a_server_that_is_not_there_is_waited_for_and_then_named(world: World):
    stub = world.stub()
    stub.stop()
    with pytest.raises(UserError, match=f"--vllm-url: vLLM at {stub.url} does not respond: .*; waited 0 s"):
        world.sampler(start_timeout_s=0.01)
    stub.start()


def test_adapters_of_an_engine_that_was_killed_are_unloaded_and_removed(world: World, tmp_path: Path):
    stub = world.stub()
    first = world.sampler()
    first.load_sampler(SamplerId("s"), world.adapter())
    draw(first, request(sampler="s"))
    killed = world.kill(first)
    assert stub.adapters
    world.sampler()
    assert not stub.adapters and not killed.exists()


def test_adapters_of_another_engine_that_runs_are_left_alone(world: World):
    stub = world.stub()
    first = world.sampler()
    first.load_sampler(SamplerId("s"), world.adapter())
    before = draw(first, request(sampler="s"))
    world.sampler()
    assert len(stub.adapters) == 1
    after = draw(first, request(sampler="s"))
    assert [delta.tokens.tolist() for delta in before] == [delta.tokens.tolist() for delta in after]
    assert len(stub.loads) == 1


def test_the_default_directory_is_one_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = AdapterDirectory(None)
    assert directory.path.is_relative_to(tmp_path)
    directory.close()
    assert not directory.path.exists()


@pytest.mark.parametrize(
    "url", ["10.0.0.1:8000", "ftp://host", "http://", "http://a,", "http://a,http://a/", "http://a?b"]
)
def test_a_url_that_is_none_is_refused(url: str):
    with pytest.raises(ValueError, match="url"):
        VllmConfig(url=url)


def test_several_urls_are_separated_by_commas():
    assert VllmConfig(url=" http://a:1/, https://b ").urls == ["http://a:1", "https://b"]
