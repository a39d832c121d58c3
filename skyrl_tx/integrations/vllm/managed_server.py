"""A vLLM server that the engine starts, restarts when it ends, and stops when the engine stops."""

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
from skyrl_tx.integrations.vllm import VllmConfig, guard
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
    """Return the words of the command `vllm`. Raises UserError if this machine does not have the program.

    With `ray_resources` vLLM runs on another node, so the program is not looked up here.
    """
    if config.ray_resources is not None:
        return ["vllm"] if config.command is None else shlex.split(config.command)
    if config.command is not None:
        words = shlex.split(config.command)
        if shutil.which(words[0]) is None:
            raise UserError(f"--vllm-command {config.command!r}: there is no program {words[0]!r}")
        return words
    sibling = Path(sys.executable).with_name("vllm")
    program = str(sibling) if sibling.is_file() else shutil.which("vllm")
    if program is None:
        raise UserError(
            "--sampler vllm: there is no program `vllm` in this environment or in PATH. Install vLLM, name the program "
            "with --vllm-command, or name a running server with --vllm-url"
        )
    return [program]


def make_serve_flags(config: VllmConfig, base_model: str, trainer: Capabilities, port: int) -> list[str]:
    """Return the arguments of the command. Raises UserError if vLLM does not support the trainer's highest rank."""
    rank = next((rank for rank in _RANKS if rank >= trainer.max_lora_rank), None)
    if rank is None:
        raise UserError(f"--backend-config.max-lora-rank {trainer.max_lora_rank}: vLLM supports at most {_RANKS[-1]}")
    flags = ["serve", base_model, "--served-model-name", NAME, "--host", _HOST, "--port", str(port)]
    flags += ["--max-model-len", str(trainer.max_context_length), "--max-logprobs", str(trainer.max_topk_logprobs + 1)]
    flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(min(config.max_adapters, _MAX_LORAS))]
    flags += ["--max-cpu-loras", str(config.max_adapters), "--max-num-seqs", str(config.max_samples)]
    flags += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
    if (dtype := trainer.fingerprint.get("dtype")) in _DTYPES:
        flags += ["--dtype", dtype]
    return [*flags, *shlex.split(config.serve_flags)]


def wrap_for_ray(resources: Mapping[str, float], port: int, adapters: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` on a node of the Ray cluster, by means of the program `run_on_ray`."""
    program = [sys.executable, "-m", "skyrl_tx.integrations.vllm.run_on_ray"]
    return [*program, json.dumps(dict(resources)), str(port), str(adapters), *command]


def reserve_port(ip: str) -> socket.socket:
    """Bind a socket to a free port, so that no other program gets the port while the socket is open.

    On Linux a server that sets SO_REUSEADDR, as vLLM does, can still listen on the port. On other systems the socket
    must be closed before the server starts.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((ip, 0))
    return reserved


class ManagedServer:
    """The process of a vLLM server. A thread logs its output, and starts it again when it ends."""

    def __init__(self, config: VllmConfig, base_model: str, trainer: Capabilities, adapters: Path) -> None:
        """Start the server. `adapters` is the directory in which the engine will write adapters.

        Raises UserError if vLLM is not installed or could not serve the adapters.
        """
        # Choose a port and build the command.
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

        # Without a key, other users of this machine could load adapters.
        key = config.api_key or SecretStr(secrets.token_urlsafe(16))
        self.config = config.model_copy(update={"url": f"http://{_HOST}:{port}", "api_key": key})
        """The settings for clients of the server, including its address and key."""
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
        self._environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": key.get_secret_value()}

        # Start the thread that runs the process.
        self._last_lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: str | None = None
        self.was_ready = False
        """Whether the server has passed the checks at start. From then on it is restarted whenever it ends."""
        self._thread = ServiceThread("vllm-process", self._run)
        _log.info("starting vLLM: %s", shlex.join(command))
        self._thread.start()

    def check(self) -> None:
        """Raise UserError, with the last lines of the log, if the process has ended before it was ready."""
        if self._failure is not None:
            raise UserError(self._failure)

    def close(self) -> None:
        """Stop the process and its child processes. Idempotent."""
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
            # Log the output until the process ends.
            started = time.monotonic()
            with process:  # closes its pipes
                assert process.stdout is not None
                for line in process.stdout:
                    self._last_lines.append(line.rstrip())
                    _log.info("vllm: %s", line.rstrip())
            status = process.returncode
            if self._closing.is_set():
                return

            # At start this is a failure; later the process starts again after a growing delay.
            if not self.was_ready:
                lines = " | ".join(line.strip() for line in self._last_lines if line.strip())
                self._failure = f"vLLM ended with status {status} before it was ready; its log ends with: {lines}"
                return
            if time.monotonic() - started > _MAX_DELAY_S:
                delay_s = _MIN_DELAY_S
            _log.error("vLLM ended with status %d; restarting it in %.0f s (training continues)", status, delay_s)
            if self._closing.wait(delay_s):
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _start(self) -> "subprocess.Popen[str] | None":
        """Start the process. Returns None if this object is closed."""
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
                process_group=0,  # Ctrl-C in a terminal must reach only the engine, which stops vLLM last
            )
            return self._process
