"""A vLLM server that this engine starts, watches, and ends with itself."""

import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.integrations.vllm import guard
from skyrl_tx.integrations.vllm.config import VllmConfig
from skyrl_tx.process.signals import ServiceThread

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
NAME = "base"
"""The name under which the server serves the base model."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `--max-lora-rank` (vLLM 0.32)."""
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_MAX_LORAS = 8
_MIN_DELAY_S, _MAX_DELAY_S = 1.0, 60.0
_SHOWN_LINES = 12
_CLOSE_S = 10.0
_OWN_VARIABLES = "SKYRL_TX_"


def find_command(config: VllmConfig) -> list[str]:
    """Return the words of the command `vllm`. Raises UserError if there is none, unless it is one of another node."""
    if config.ray_resources is not None:
        return ["vllm"] if config.command is None else shlex.split(config.command)
    if config.command is not None:
        words = shlex.split(config.command)
        if shutil.which(words[0]) is None:
            raise UserError(f"--vllm-command {config.command!r}: there is no program {words[0]!r}")
        return words
    near = Path(sys.executable).with_name("vllm")
    found = str(near) if near.is_file() else shutil.which("vllm")
    if found is None:
        raise UserError(
            "--sampler vllm: there is no program `vllm` in this environment or in PATH: install vLLM, name the program "
            "with --vllm-command, or name a server that runs with --vllm-url"
        )
    return [found]


def make_serve_flags(config: VllmConfig, base_model: str, trainer: Capabilities, port: int) -> list[str]:
    """Return what follows the command. Raises UserError if vLLM has no adapters of the trainer's highest rank."""
    rank = next((each for each in _RANKS if each >= trainer.max_lora_rank), None)
    if rank is None:
        raise UserError(f"--backend-config.max-lora-rank {trainer.max_lora_rank}: vLLM has at most {_RANKS[-1]}")
    flags = ["serve", base_model, "--served-model-name", NAME, "--host", _HOST, "--port", str(port)]
    flags += ["--max-model-len", str(trainer.max_context_length), "--max-logprobs", str(trainer.max_topk_logprobs + 1)]
    flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(min(config.max_adapters, _MAX_LORAS))]
    flags += ["--max-cpu-loras", str(config.max_adapters), "--max-num-seqs", str(config.max_samples)]
    flags += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    if (dtype := trainer.fingerprint.get("dtype")) in _DTYPES:
        flags += ["--dtype", dtype]
    return [*flags, *shlex.split(config.serve_flags)]


def wrap_for_ray(resources: Mapping[str, float], port: int, adapters: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one in a Ray cluster; see the program of that name."""
    program = [sys.executable, "-m", "skyrl_tx.integrations.vllm.on_ray"]
    return [*program, json.dumps(dict(resources)), str(port), str(adapters), *command]


def reserve_port(ip: str) -> socket.socket:
    """Return a socket with a free port, which no other program gets as long as it is open.

    On Linux a server that reuses addresses, as vLLM does, may listen at the port all the same. Close it elsewhere.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((ip, 0))
    return reserved


class ManagedServer:
    """The process, its log, and its next start after it has ended."""

    def __init__(self, config: VllmConfig, base_model: str, trainer: Capabilities, adapters: Path) -> None:
        """`adapters` is where they will be. Raises UserError if vLLM is not there, or could not serve them."""
        self._reserved = reserve_port(_HOST)
        port = int(self._reserved.getsockname()[1])
        if sys.platform != "linux":
            self._reserved.close()
        try:
            command = [*find_command(config), *make_serve_flags(config, base_model, trainer, port)]
        except UserError:
            self._reserved.close()
            raise
        wrapped = (
            command if config.ray_resources is None else wrap_for_ray(config.ray_resources, port, adapters, command)
        )
        self._command = [sys.executable, "-P", guard.__file__, *wrapped]
        key = config.api_key or SecretStr(secrets.token_urlsafe(16))  # others on this machine could load adapters
        self.config = config.model_copy(update={"url": f"http://{_HOST}:{port}", "api_key": key})
        """The settings of a client of the server."""
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
        self._environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": key.get_secret_value()}
        self._last_lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: str | None = None
        self.was_ready = False
        """Whether the server has passed the checks of the start; from then on it is started again whenever it ends."""
        self._thread = ServiceThread("vllm-process", self._run)
        _log.info("starting vLLM: %s", shlex.join(command))
        self._thread.start()

    def check(self) -> None:
        """Raise UserError, with the end of its log, if the process has ended before it was ready."""
        if self._failure is not None:
            raise UserError(self._failure)

    def close(self) -> None:
        """End the process with all that it has started. Idempotent."""
        with self._lock:
            self._closing.set()
            self._reserved.close()
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive() and self._process is not None:
            _log.warning("vLLM did not end within %.0f s; killing it", _CLOSE_S)
            self._process.kill()

    def _run(self) -> None:
        delay_s = _MIN_DELAY_S
        while (process := self._start()) is not None:
            started = time.monotonic()
            with process:  # closes its pipes
                assert process.stdout is not None
                for line in process.stdout:
                    self._last_lines.append(line.rstrip())
                    _log.info("vllm: %s", line.rstrip())
            status = process.returncode
            if self._closing.is_set():
                return
            if not self.was_ready:
                lines = " | ".join(each.strip() for each in self._last_lines if each.strip())
                self._failure = f"vLLM ended with status {status} before it was ready; its log ends with: {lines}"
                return
            if time.monotonic() - started > _MAX_DELAY_S:
                delay_s = _MIN_DELAY_S
            _log.error("vLLM ended with status %d; it starts again in %.0f s, and training goes on", status, delay_s)
            if self._closing.wait(delay_s):
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _start(self) -> "subprocess.Popen[str] | None":
        """Start the process, unless this object is closed."""
        with self._lock:
            if self._closing.is_set():
                return None
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C in a terminal must not end it before its samples
            )
            return self._process
