"""A vLLM server that the engine starts, replaced by a stub command."""

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.contract.meters import Meters
from skyrl_tx.integrations.vllm import VllmConfig, guard
from skyrl_tx.integrations.vllm.managed_server import find_command, make_serve_flags
from skyrl_tx.integrations.vllm.sampler import VllmSampler
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_world import World, draw, get_tokens, request

ROOT = Path(__file__).resolve().parents[4]
STUB = f"env PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m tests.support.vllm_command"
STARTED = re.compile(r"stub of vLLM (\d+) serves tiny")
CAPABILITIES = FakeBackend("tiny", FakeConfig(max_context_length=64)).start()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[int]]]:
    """Return a function that reads the process ids of started stubs from the forwarded log."""
    with caplog.at_level(logging.INFO, "skyrl_tx.integrations.vllm"):
        yield lambda: [int(number) for number in STARTED.findall(caplog.text)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_started_used_started_again_and_ended(
    world: World, logged: Callable[[], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    world.use(FakeConfig(max_context_length=64, slice_tokens=2))
    sampler = VllmSampler("tiny", VllmConfig(command=STUB, lost_after_s=0.05, adapter_dir=world.directory))

    try:
        both = sampler.start(world.capabilities)
        assert (both.max_context_length, both.max_topk_logprobs) == (64, world.capabilities.max_topk_logprobs)

        [first] = logged()
        [url] = sampler._config.urls
        assert httpx.get(f"{url}/v1/models").status_code == 401, "others on this machine cannot use it"

        sampler.load_sampler(SamplerId("s"), world.adapter())
        before = get_tokens(draw(sampler, request(sampler="s")))
        assert len(before) == 12

        os.kill(first, signal.SIGKILL)
        assert get_tokens(draw(sampler, request(sampler="s"))) == before

        [_, second] = logged()
        assert "vLLM ended with status 137; restarting it in 1 s (training continues)" in caplog.text
        assert "waiting for vLLM" in caplog.text

        world.wait(lambda: sampler.meters(Meters()).outage is None)
    finally:
        sampler.close()

    assert not is_running(first) and not is_running(second)


def test_a_server_that_ends_before_it_is_ready_fails_the_start_with_the_end_of_its_log() -> None:
    sampler = VllmSampler("tiny", VllmConfig(command=STUB, serve_flags="--fail 3"))
    with pytest.raises(UserError, match=r"vLLM ended with status 3 before .*RuntimeError: the stub was asked to fail$"):
        sampler.start(CAPABILITIES)
    sampler.close()
    sampler.close()


def test_a_command_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--vllm-command 'novllm --x': there is no program 'novllm'"):
        VllmSampler("tiny", VllmConfig(command="novllm --x"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"Install vLLM, name the program with --vllm-command, or .* with --vllm-url"):
        find_command(VllmConfig())
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    assert find_command(VllmConfig()) == [str(tmp_path / "vllm")]
    assert find_command(VllmConfig(command="vllm -x 'a b'")) == ["vllm", "-x", "a b"]


def test_flags_follow_from_the_trainer_and_the_operators_come_last() -> None:
    trainer = replace(CAPABILITIES, max_lora_rank=20, max_topk_logprobs=20, fingerprint={"dtype": "bfloat16"})
    config = VllmConfig(max_adapters=4, max_samples=9, serve_flags="--dtype float16 --max-loras 2")
    flags = make_serve_flags(config, "a model", trainer, 8100)
    assert flags[:2] == ["serve", "a model"]
    given = dict(pairwise(flags))
    assert given["--max-lora-rank"] == "32" and given["--max-logprobs"] == "21" and given["--max-cpu-loras"] == "4"
    assert given["--max-num-seqs"] == "9" and given["--max-model-len"] == "64" and given["--host"] == "127.0.0.1"
    assert flags.index("bfloat16") < flags.index("float16") and flags[-2:] == ["--max-loras", "2"]
    assert "--dtype" not in make_serve_flags(VllmConfig(), "m", CAPABILITIES, 1), "vLLM has no float64"
    with pytest.raises(UserError, match=r"--backend-config.max-lora-rank 513: vLLM supports at most 512"):
        make_serve_flags(VllmConfig(), "m", replace(CAPABILITIES, max_lora_rank=513), 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"command": "vllm"},
        {"serve_flags": "--x"},
        {"ray_resources": {"GPU": 1}},
        {"url": None, "ray_resources": {"GPU": 0}},
        {"url": None, "command": "'"},
    ],
)
def test_settings_of_an_own_server_do_not_go_with_a_url(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(reversed(settings)).replace("_", "[-_]")):
        VllmConfig(**{"url": "http://a"} | settings)


@pytest.mark.parametrize("end", ["input", "kill"])
def test_a_guard_leaves_nothing_behind(end: str, world: World) -> None:
    """The command's child processes end too, and a killed guard ends the command with it."""
    script = "sleep 600 & echo $$ $!; wait"

    with subprocess.Popen(
        [sys.executable, "-P", guard.__file__, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        leader, other = map(int, process.stdout.readline().split())
        assert is_running(leader) and is_running(other)

        if end == "input":
            process.stdin.close()
        else:
            process.kill()
        world.wait(lambda: not is_running(leader))
        if end == "input":
            world.wait(lambda: not is_running(other))
            assert process.wait() == 128 + signal.SIGTERM
        else:
            os.kill(other, signal.SIGKILL)
