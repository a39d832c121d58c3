"""The quickstart: start a server with a tiny model, train the model through the Tinker SDK, and print the results."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from matplotlib.figure import Figure
from tinker import SamplingClient, ServiceClient, TinkerError, TrainingClient

from skyrl_tx.launch.settings import QuickstartSettings
from skyrl_tx.tools.quickstart import training
from skyrl_tx.tools.quickstart.model import TINY_MODELS, TITLES, find_architecture, write_tiny_model
from skyrl_tx.tools.quickstart.training import QuestionFileError, QuestionSet, load_excerpt, load_questions

ANY_KEY = "tml-local"  # the SDK requires a key of this form; a server on loopback accepts any key

RANK = 32
SEED = 0
"""Seed of the adapter's weights, the order of questions and the samples."""
NUM_SHOWN = 2  # questions whose answers are printed
NUM_REWARDED = 32  # held-out questions whose answers are rewarded, four each
NUM_HELD_OUT = 64  # questions of the held-out loss
PRINT_EVERY = 20  # supervised steps
SAMPLE_SLOTS = 8
"""How many samples the server decodes at the same time.

With more slots, the server would compile programs for multiple batch sizes. In such a short training this takes longer
than larger batches save.
"""
_READY = re.compile(r"ready at (https?://\S+);")
_READY_WITHIN_S = 600.0
_PRINT_COMPILATION_EVERY_S = 10.0
_STOPPED_WITHIN_S = 40.0


def run(settings: QuickstartSettings) -> int:
    """Run the quickstart and return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM stops the server like Ctrl-C
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers would advise to install torch

    # Check the input and the output directory.
    try:
        questions = load_questions(settings.data) if settings.data else load_excerpt()
        settings.output.mkdir(parents=True, exist_ok=True)
        _check_output(settings)
    except (QuestionFileError, OutputInUse, OSError) as error:
        print(f"skyrl-tx quickstart: {error}", file=sys.stderr)
        return 2

    # Train.
    try:
        _serve_and_train(settings, questions)
    except (ServerFailed, TinkerError, httpx.HTTPError) as error:
        print(f"skyrl-tx quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("skyrl-tx quickstart: stopped", file=sys.stderr)
        return 130
    return 0


class OutputInUse(Exception):
    """The output directory contains a run with another architecture."""


def _check_output(settings: QuickstartSettings) -> None:
    """Raise OutputInUse if the directory has a model of another architecture, which earlier checkpoints need."""
    architecture = find_architecture(settings.output / "model")
    if architecture not in (None, settings.architecture):
        raise OutputInUse(
            f"--output {settings.output} has a run with --architecture {architecture}; choose another directory"
        )


def _serve_and_train(settings: QuickstartSettings, questions: QuestionSet) -> None:
    # Write the model.
    started = time.monotonic()
    name = next(name for name, architecture in TINY_MODELS.items() if architecture == settings.architecture)
    model = write_tiny_model(settings.output / "model", settings.architecture)
    title, seconds = TITLES[settings.architecture], time.monotonic() - started
    print(f"Tiny model: {model} ({title} architecture, random weights, written in {seconds:.1f} s)")
    print(f"Questions: {len(questions.train)} to train on, {len(questions.held_out)} held out")

    # Serve the model, and train it: first supervised, then by reward.
    data_dir, log, curves = (settings.output / name for name in ("server", "server.log", "curves.png"))
    flags = ("--base-model", str(model.resolve()), "--served-model-name", name)
    flags += ("--backend-config.sample-slots", str(SAMPLE_SLOTS))
    with serve(data_dir.resolve(), log, *flags) as url:
        print(f"Server: {url}, ready after {time.monotonic() - started:.1f} s", flush=True)
        with ServiceClient(base_url=url, api_key=ANY_KEY, display_name="quickstart") as service:
            client = service.create_lora_training_client(name, rank=RANK, seed=SEED).result()
            page = f"{url}/training_runs/{client.model_id}"
            print(f"Watch it live: {page} (curves of loss and reward, samples, checkpoints)", flush=True)
            trainer = _Trainer(client, questions, url)
            print_compilation(url)
            nll, reward = trainer.train_supervised(settings.steps), trainer.train_by_reward(settings.rl_steps)
            draw_curves(curves, nll, reward)
            to_train = client.save_state("quickstart").result().path
            to_sample = client.save_weights_for_sampler("quickstart").result().path

    print(f"""
Held-out loss    {nll.before:.3f} -> {nll.after:.3f} nats per answer token
Held-out reward  {reward.before:.3f} -> {reward.after:.3f}
Curves      {curves}
Checkpoints {to_train} (to train on)
            {to_sample} (to sample from)
Server log  {log}
Done in {time.monotonic() - started:.0f} s. To serve this model and its checkpoints again, and to talk to them \
at http://127.0.0.1:8000/playground:
  skyrl-tx serve {model} --served-model-name {name} --data-dir {data_dir} --backend-config.sample-slots {SAMPLE_SLOTS}
The same with a real model: skyrl-tx serve Qwen/Qwen3-0.6B, and in Python \
tinker.ServiceClient(base_url="http://127.0.0.1:8000", api_key="{ANY_KEY}")\
.create_lora_training_client("Qwen/Qwen3-0.6B").result()""")


def print_compilation(url: str) -> None:
    """Print the progress of the server while it compiles programs. Prints in a new thread, and returns at once."""

    def watch() -> None:
        with suppress(httpx.HTTPError):  # the server has stopped
            while detail := httpx.get(f"{url}/api/v1/healthz").json().get("detail"):
                print(f"  server: {detail}", flush=True)
                time.sleep(_PRINT_COMPILATION_EVERY_S)

    print("The server compiles programs for the shapes of this training; later runs reuse them.", flush=True)
    threading.Thread(target=watch, daemon=True).start()


class ServerFailed(Exception):
    """The server exited or was not ready in time. The message contains its log."""


@contextmanager
def serve(data_dir: Path, log: Path, *flags: str) -> Generator[str]:
    """Run a server on a free port while the context is entered, and yield its URL. Its log goes to the file `log`.

    Raises ServerFailed.
    """
    command = [sys.executable, "-m", "skyrl_tx", "serve", "--port", "0", "--data-dir", str(data_dir), *flags]
    # A new process group: otherwise Ctrl-C would stop the server before its clients.
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, process_group=0) as process:
        try:
            url = _wait_for_url(process, log)
            try:
                yield url
            finally:
                process.terminate()
                process.wait(_STOPPED_WITHIN_S)
        finally:
            process.kill()  # has no effect on a process that has ended


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _READY_WITHIN_S
    has_ended = False
    while not has_ended and time.monotonic() < end:
        has_ended = process.poll() is not None
        if found := _READY.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise ServerFailed(f"the server exited or was not ready after {_READY_WITHIN_S:.0f} s:\n{log.read_text()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCurve:
    """A metric during one kind of training.

    `batches` has its value for the batch of each step, `before` and `after` its value on held-out questions.
    """

    batches: Sequence[float]
    before: float
    after: float


class _Trainer:
    """Runs supervised training, then reinforcement learning, and prints the progress."""

    def __init__(self, client: TrainingClient, questions: QuestionSet, url: str):
        self._client = client
        self._metrics_url = f"{url}/api/v1/training_runs/{client.model_id}/metrics"
        self._num_steps = 0
        self._questions = questions
        self._chat = training.Chat(client.get_tokenizer())
        self._started = time.monotonic()

    def train_supervised(self, num_steps: int) -> MetricCurve:
        """Train on worked answers. Raises the errors of the SDK."""
        # Measure before.
        self._print(f"Supervised: {num_steps} steps of {training.SFT_BATCH_SIZE} worked answers, loss cross_entropy")
        train = [self._chat.make_sft_datum(question) for question in self._questions.train]
        held_out = [self._chat.make_sft_datum(question) for question in self._questions.held_out[:NUM_HELD_OUT]]
        before = training.measure_held_out_nll(self._client, held_out)
        self._print(f"  held-out loss before  {before:.3f} nats per answer token")
        self._print_answers("before training", self._make_sampler())

        # Train.
        losses: list[float] = []
        for step, nll in enumerate(training.train_sft(self._client, train, num_steps, SEED), start=1):
            losses.append(nll)
            self._log(step, train_nll=nll)
            if step % PRINT_EVERY == 1 or step == num_steps:
                self._print(f"  step {step:4d}/{num_steps}  loss {nll:.3f}")

        # Measure after.
        after = training.measure_held_out_nll(self._client, held_out)
        self._num_steps = num_steps
        self._log(0, held_out_nll=before)
        self._log(num_steps, held_out_nll=after)
        self._print(f"  held-out loss after   {after:.3f}")
        self._print_answers("after supervised training", self._make_sampler())
        return MetricCurve(batches=losses, before=before, after=after)

    def train_by_reward(self, num_steps: int) -> MetricCurve:
        """Train on sampled answers and their rewards. Raises the errors of the SDK."""
        # Measure before.
        self._print(
            f"Reinforcement: {num_steps} steps of {training.RL_NUM_GROUPS} x {training.RL_GROUP_SIZE} sampled "
            f"answers, loss importance_sampling, and of {training.SFT_BATCH_SIZE} worked answers; "
            f"reward {training.REWARD_TEXT}"
        )
        held_out = self._questions.held_out[:NUM_REWARDED]
        before = training.measure_mean_reward(self._make_sampler(), self._chat, held_out, SEED)
        self._print(f"  held-out reward before  {before:.3f}")

        # Train.
        rewards: list[float] = []
        steps = training.train_rl(self._client, self._chat, self._questions.train, num_steps, SEED)
        for step, (reward, num_trained) in enumerate(steps, start=1):
            rewards.append(reward)
            self._log(self._num_steps + step, reward=reward, answers_trained_on=num_trained)
            self._print(f"  step {step:4d}/{num_steps}  reward {reward:.3f}  trained on {num_trained} answers")

        # Measure after.
        sampler = self._make_sampler()
        after = training.measure_mean_reward(sampler, self._chat, held_out, SEED)
        self._log(self._num_steps, held_out_reward=before)
        self._log(self._num_steps + num_steps, held_out_reward=after)
        self._print(f"  held-out reward after   {after:.3f}")
        self._print_answers("after reinforcement", sampler)
        self._print("  This reward counts only the form of an answer: a tiny model cannot learn arithmetic.")
        return MetricCurve(batches=rewards, before=before, after=after)

    def _log(self, step: int, **metrics: float) -> None:
        """Send metrics that only the client knows to the page of the run. Raises httpx.HTTPError."""
        body = {"step": step, "metrics": metrics}
        httpx.post(self._metrics_url, json=body, headers={"X-API-Key": ANY_KEY}).raise_for_status()

    def _make_sampler(self) -> SamplingClient:
        return self._client.save_weights_and_get_sampling_client().result()

    def _print_answers(self, when: str, sampler: SamplingClient) -> None:
        lines = training.format_answers(sampler, self._chat, self._questions.held_out[:NUM_SHOWN], SEED)
        self._print(f"  held-out answers {when}:")
        print(*lines, sep="\n", flush=True)

    def _print(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {line}", flush=True)


def draw_curves(path: Path, nll: MetricCurve, reward: MetricCurve) -> None:
    """Write a PNG with the supervised loss on the left and the reward on the right."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(title="Supervised: cross_entropy", ylabel="nats per answer token")
    right.set(title="Reinforcement: importance_sampling", ylabel="mean reward")
    for axes, curve, top in ((left, nll, None), (right, reward, 1.0)):
        steps = len(curve.batches)
        axes.plot(range(steps), curve.batches, color="tab:blue", label="training batch")
        axes.plot([0, steps], [curve.before, curve.after], "o", color="tab:orange", label="held out, before and after")
        axes.set(xlabel="step", ylim=(0, top))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
