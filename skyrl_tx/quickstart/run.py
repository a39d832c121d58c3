"""The quickstart itself: make the tiny model, serve it in processes of its own, train it through the Tinker SDK."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tinker import ServiceClient, TinkerError

from skyrl_tx.quickstart.lesson_plan import LessonPlan, Results
from skyrl_tx.quickstart.questions import QuestionFileError, QuestionSet, load_excerpt, load_questions
from skyrl_tx.quickstart.settings import QuickstartSettings
from skyrl_tx.quickstart.tiny_model import write_tiny_model
from skyrl_tx.testing.live_server import LiveServer, ServerFailed

MODEL_NAME = "tiny"
ANY_KEY = "tml-local"  # the SDK wants a key of this form; the server, on loopback, asks for none


def run(settings: QuickstartSettings) -> int:
    """Do all of it and print it; return the exit status."""
    try:
        questions = load_questions(settings.data) if settings.data else load_excerpt()
        settings.output.mkdir(parents=True, exist_ok=True)
    except (QuestionFileError, OSError) as error:
        print(f"skyrl-tx quickstart: {error}", file=sys.stderr)
        return 2
    try:
        with _stopped_by_sigterm():
            _serve_and_teach(settings, questions)
    except (ServerFailed, TinkerError) as error:
        print(f"skyrl-tx quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("skyrl-tx quickstart: stopped", file=sys.stderr)
        return 130
    return 0


def _serve_and_teach(settings: QuickstartSettings, questions: QuestionSet) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would tell that there is no torch; none is needed
    began = time.monotonic()
    model = write_tiny_model(settings.output / "model")
    print(f"Tiny model: {model} (Qwen3 architecture, random weights, made in {time.monotonic() - began:.1f} s)")
    print(f"Questions: {len(questions.train)} to train on, {len(questions.held_out)} held out")
    flags = ("--base-model", str(model.resolve()), "--served-model-name", MODEL_NAME)
    data_dir = settings.output / "server"
    server = LiveServer(data_dir.resolve(), flags=flags, ready_within_s=120.0)
    try:
        with server:
            print(f"Server: {server.url}, ready after {time.monotonic() - began:.1f} s", flush=True)
            with ServiceClient(base_url=server.url, api_key=ANY_KEY, display_name="quickstart") as service:
                results = LessonPlan(service, MODEL_NAME, questions, settings).run()
    finally:
        (settings.output / "server.log").write_text(server.log)
    print("\n".join(_summary(settings, results, model, data_dir, time.monotonic() - began)), flush=True)


def _summary(
    settings: QuickstartSettings, results: Results, model: Path, data_dir: Path, seconds: float
) -> Iterator[str]:
    nll, reward = results.nll, results.reward
    yield ""
    yield f"Held-out loss    {nll.before:.3f} -> {nll.after:.3f} nats per answer token"
    yield f"Held-out reward  {reward.before:.3f} -> {reward.after:.3f}"
    yield f"Curves      {results.curves}"
    yield f"Checkpoint  {results.checkpoint}"
    yield f"Server log  {settings.output / 'server.log'}"
    yield f"Done in {seconds:.0f} s. To serve this model and its checkpoint again:"
    yield f"  skyrl-tx serve --base-model {model} --served-model-name {MODEL_NAME} --data-dir {data_dir}"
    yield (
        "The same with a real model: skyrl-tx serve --base-model Qwen/Qwen3-0.6B, and in Python "
        f'tinker.ServiceClient(base_url="http://127.0.0.1:8000", api_key="{ANY_KEY}")'
        '.create_lora_training_client("Qwen/Qwen3-0.6B").result()'
    )


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that the server is stopped too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
