"""End-to-end reinforcement learning on one GPU: a real server with default settings, used through the SDK.

The phases run one after another, so that only one process at a time uses the GPU's memory:

- `checkpoint` writes random weights in the layout of Hugging Face, into memory if there is room;
- `serve` starts `skyrl-tx serve` with no compiled programs and no data;
- `iterations` runs one iteration to warm up and then times another, as tinker-cookbook does: save the weights for a
  sampler, sample, train one step with importance sampling;
- `hand_over` times the way from `save_weights_for_sampler` to the first token, for 1 and 8 tenants at once;
- `train_peer` and `sample_peer` do the same work with transformers and peft, and with continuous batching of
  transformers;
- `warm` starts the server again with all programs compiled, and measures the seconds until it is ready, until the
  first sample, and of the first step;
- `cold` does the same with no compiled programs.

The shape `fixed-512` has 64 requests of 16 samples with 512 tokens each. The shape `gsm8k` draws lengths as GSM8K
solutions have them, and sends one request for each of the 1,024 samples. No sample stops early.

A phase is recorded as soon as it ends, even if it failed or reached its time limit. A run skips phases that have a
record for this commit, device, model, shape and flags, so it can be stopped and continued. A phase that was cut because
the time of the whole run was over is repeated. `--model tiny` shows on any machine that the program works.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import get_commit
from benchmarks.gpu_rl.child import PhaseCut, PhaseFailed, exit_on_sigterm, run_module
from benchmarks.gpu_rl.device import NO_GPU, MemoryWatch, read_device_name, read_driver_version
from benchmarks.gpu_rl.records import Records
from benchmarks.gpu_rl.server import Server
from benchmarks.gpu_rl.shapes import MODELS, ROOT, SHAPES
from benchmarks.gpu_rl.table import make_table

RECORDS = ROOT / "benchmarks" / "results" / "gpu_rl.json"
LIMITS_S = {
    "checkpoint": 60.0,
    "serve": 150.0,
    "iterations": 330.0,
    "hand_over": 60.0,
    "train_peer": 70.0,
    "sample_peer": 80.0,
    "warm": 70.0,
    "cold": 150.0,
}
"""Time limits by phase, in the order of a run. The seconds until the server was ready count towards `iterations`."""
LEAST_S = 5.0
"""A phase is not started if less time is left."""
HAND_OVER_ROUNDS = {1: 12, 8: 3}
"""By number of tenants. In a round each of them saves and samples once."""
RANK = 32
PEER_SAMPLES, PEER_ROW_TOKENS, PEER_STEPS = 256, 16384, 3
"""Samples that transformers draws at once, and the tokens of a training step of it."""
MEMORY_BACKED, CHECKPOINT_BYTES = Path("/dev/shm"), 24 << 30
"""The checkpoint is written there if it has as much free space, else into the work directory."""


class Run:
    """A run of the phases that have no record yet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._shape, self._config = SHAPES[options.shape], MODELS[options.model]
        self._end = time.monotonic() + options.budget_s
        self._limits = LIMITS_S | dict(options.limit)
        self._ended: set[str] = set()
        self._server: Server | None = None
        self._work: Path = options.work
        self._work.mkdir(parents=True, exist_ok=True)
        self._log = self._work / "gpu_rl.log"
        self._model = choose_directory(self._work) / options.model
        self.device = read_device_name()
        files = [options.records, *([options.out / RECORDS.name] if options.out else [])]
        settings = {"model": options.model, "shape": options.shape, "flags": options.flags}
        device = {"device": self.device, "driver": read_driver_version()}
        self.records = Records.open(files, options.commit or get_commit(), device, settings)

    def run(self) -> None:
        """Do all phases that are left, and print the table."""
        try:
            if any(self._is_due(phase) for phase in LIMITS_S) and self._has_checkpoint():
                can_serve = self._do_serve()
                if can_serve:
                    self._do("iterations", self._iterate)
                    self._do("hand_over", self._hand_over)
                    self._stop_server()
                self._do("train_peer", self._train_peer)
                self._do("sample_peer", self._sample_peer)
                if can_serve:
                    self._do_restarts()
        finally:
            self._stop_server()
        print(make_table(self.records.find, self._options.model, self._options.shape, self.device))

    def _do_serve(self) -> bool:
        """Start the first server, if that is due; return whether a server can start at all."""
        if self._is_due("serve"):
            shutil.rmtree(self._cache, ignore_errors=True)
            self._do("serve", self._serve)
        can_serve = "problem" not in (self.records.find("serve") or {})
        if not can_serve:
            print("the server did not start, so that no phase which needs it is started", flush=True)
        return can_serve

    def _do_restarts(self) -> None:
        """Start a server with compiled programs (left by `iterations` if possible), and a server without them."""
        if self._cache.is_dir():
            self._do("warm", lambda limit_s: self._probe(self._cache, limit_s))
        self._do("cold", self._probe_cold)
        if self._cold_cache.is_dir():
            self._do("warm", lambda limit_s: self._probe(self._cold_cache, limit_s))

    @property
    def _cache(self) -> Path:
        """The compiled programs of the server that runs the iterations."""
        return self._work / "cache"

    @property
    def _cold_cache(self) -> Path:
        """The compiled programs of the phase `cold`, which starts without any."""
        return self._work / "cold-cache"

    def _is_due(self, phase: str) -> bool:
        """Return whether a phase is wanted and has no final record."""
        if phase not in self._options.phases or phase in self._ended:
            return False
        record = self.records.find(phase)
        return self._options.again or record is None or bool(record.get("ended_with_the_run"))

    def _do(self, phase: str, work: Callable[[float], dict[str, Any]], *, needed: bool = False) -> None:
        """Run a phase within its time limit and record it, if it is due or another phase needs it."""
        if not (needed or self._is_due(phase)):
            return

        left_s = self._end - time.monotonic()
        if left_s < LEAST_S:
            print(f"{phase}: not started, as {max(left_s, 0):.0f} s are left; run the same command again", flush=True)
            return

        limit_s, started = min(self._limits[phase], left_s), time.monotonic()
        problem: dict[str, Any] = {}
        with MemoryWatch() as memory:
            try:
                results = work(limit_s)
            except PhaseCut as error:
                results = error.results
                problem = {"problem": f"cut at its limit of {limit_s:.0f} s"}
                if limit_s < self._limits[phase]:
                    problem["ended_with_the_run"] = True
            except PhaseFailed as error:
                problem, results = {"problem": str(error)}, error.results

        if problem and self._server is not None:
            self._server.kill()  # it may still work on requests of the phase
            self._server = None

        took_s = time.monotonic() - started
        self._ended.add(phase)
        self.records.put(phase, {**problem, **results, **memory.figures, "phase_s": round(took_s, 1)})
        if self._options.out:
            shutil.copy(self._log, self._options.out)
        print(f"{phase}: {problem.get('problem', 'done').splitlines()[-1]}, {took_s:.0f} s", flush=True)

    def _has_checkpoint(self) -> bool:
        """Return whether this machine has the checkpoint, after writing it if not."""
        complete = self._model / "complete"

        def write(limit_s: float) -> dict[str, Any]:
            size = "100KB" if self._options.model.startswith("tiny") else "2GB"
            arguments = {"directory": str(self._model), "config": self._config, "max_shard_size": size}
            results = self._run_peer("write_checkpoint", arguments, limit_s)
            complete.touch()
            return results

        if not complete.exists():
            self._do("checkpoint", write, needed=True)
        return complete.exists()

    def _serve(self, limit_s: float) -> dict[str, Any]:
        return self._find_server(limit_s).describe_start()

    def _find_server(self, limit_s: float) -> Server:
        """Return the first server, started if it does not run."""
        if self._server is None:
            self._server = self._start(self._cache, limit_s)
        return self._server

    def _start(self, cache: Path, limit_s: float) -> Server:
        """Start a server without data, and with these compiled programs."""
        data = self._work / "data"
        shutil.rmtree(data, ignore_errors=True)
        flags = shlex.split(self._options.flags)
        return Server(self._model, flags, cache=cache, data=data, log=self._log, limit_s=limit_s)

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _iterate(self, limit_s: float) -> dict[str, Any]:
        ready_s = (self.records.find("serve") or {}).get("ready_s", 0.0)
        return self._run_client("iterate", min(limit_s, self._limits["iterations"] - ready_s), iterations=1)

    def _hand_over(self, limit_s: float) -> dict[str, Any]:
        return self._run_client("hand_over", limit_s, rounds=HAND_OVER_ROUNDS)

    def _run_client(self, module: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Run a phase against the first server."""
        end = time.monotonic() + limit_s
        server = self._find_server(limit_s)
        return run_module(module, self._describe_work(server) | arguments, self._log, end - time.monotonic())

    def _describe_work(self, server: Server) -> dict[str, Any]:
        return {"url": server.url, "shape": asdict(self._shape), "vocab_size": self._config["vocab_size"]}

    def _probe(self, cache: Path, limit_s: float) -> dict[str, Any]:
        """Start a server, and time its first samples and its first step."""
        end = time.monotonic() + limit_s
        with self._start(cache, limit_s) as server:
            start = server.describe_start()
            try:
                found = run_module("probe", self._describe_work(server), self._log, end - time.monotonic())
            except (PhaseCut, PhaseFailed) as error:
                error.results = start | error.results
                server.kill()
                raise
            return start | found

    def _probe_cold(self, limit_s: float) -> dict[str, Any]:
        shutil.rmtree(self._cold_cache, ignore_errors=True)
        return self._probe(self._cold_cache, limit_s)

    def _train_peer(self, limit_s: float) -> dict[str, Any]:
        arguments = {
            "model": str(self._model),
            "lengths": [self._shape.prompt_tokens + length - 1 for length in self._shape.draw_lengths(1)],
            "row_tokens": PEER_ROW_TOKENS,
            "steps": PEER_STEPS,
            "rank": RANK,
        }
        return self._run_peer("train_peer", arguments, limit_s)

    def _sample_peer(self, limit_s: float) -> dict[str, Any]:
        prompts = self._shape.draw_prompts(self._config["vocab_size"], 1)
        arguments = {
            "model": str(self._model),
            "prompts": [prompt for prompt in prompts for _ in range(self._shape.samples)][:PEER_SAMPLES],
            "lengths": self._shape.draw_lengths(1)[:PEER_SAMPLES],
        }
        return self._run_peer("sample_peer", arguments, limit_s)

    def _run_peer(self, module: str, arguments: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return run_module(module, arguments, self._log, limit_s, python=self._options.peer_python)


def choose_directory(work: Path) -> Path:
    """Return where checkpoints are written: a memory-backed directory if it has room, else the work directory."""
    if MEMORY_BACKED.is_dir():
        directory = MEMORY_BACKED / work.name
        if directory.is_dir() or shutil.disk_usage(MEMORY_BACKED).free >= CHECKPOINT_BYTES:
            return directory
    return work


def parse_limit(text: str) -> tuple[str, float]:
    """Read `PHASE=SECONDS`."""
    phase, _, seconds = text.partition("=")
    if phase not in LIMITS_S:
        raise argparse.ArgumentTypeError(f"{phase!r} is no phase; there are {', '.join(LIMITS_S)}")
    return phase, float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-4B")
    parser.add_argument("--shape", choices=SHAPES, help="default: fixed-512, or tiny for the model tiny")
    parser.add_argument("--flags", default="", help='flags of the server, such as "--backend-config.sample-slots 512"')
    parser.add_argument("--budget-s", type=float, default=570.0, help="seconds of the whole run")
    parser.add_argument("--limit", type=parse_limit, action="append", default=[], metavar="PHASE=SECONDS")
    parser.add_argument("--phases", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--again", action="store_true", help="also do phases that have a record")
    parser.add_argument("--records", type=Path, default=RECORDS, help="JSON file of the records")
    parser.add_argument("--out", type=Path, help="directory that gets a copy of the records, and the log")
    parser.add_argument("--commit", help="what the records name as commit, where git is missing")
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable), help="has torch, transformers, peft")
    default_work = Path(tempfile.gettempdir()) / "skyrl_tx-gpu_rl"
    parser.add_argument("--work", type=Path, default=default_work, help="directory of checkpoint, servers and log")
    options = parser.parse_args()

    options.shape = options.shape or ("tiny" if options.model.startswith("tiny") else "fixed-512")
    if read_device_name() == NO_GPU and not options.model.startswith("tiny"):
        sys.exit("no GPU: nvidia-smi does not find one; --model tiny runs on any machine")

    exit_on_sigterm()
    Run(options).run()


if __name__ == "__main__":
    main()
