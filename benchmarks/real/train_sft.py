"""Supervised training on GSM8K through the SDK. On request, the engine is killed in the middle."""

import json
import os
import signal
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tinker import AdamParams, Datum, TrainingClient
from transformers import AutoTokenizer

from benchmarks.gpu_rl.client import connect, create_adapter
from benchmarks.gpu_rl.progress import read_arguments, save_progress
from benchmarks.real.questions import load
from skyrl_tx.tools.quickstart.training import (
    Chat,
    compute_mean_nll,
    measure_held_out_nll,
    shuffle_forever,
)

ADAM = {"learning_rate": 5e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
EVALUATE_EVERY = 4
"""Steps from one measurement of the held-out loss to the next."""
LONGEST = 224
"""Examples with more tokens are left out, so that a step takes seconds on two cores."""


def main(
    url: str,
    model: str,
    questions: str | None,
    seeds: list[int],
    steps: int,
    rows: int,
    held_out_rows: int,
    batches: str | None = None,
    kill_at: int | None = None,
    engine: int | None = None,
) -> None:
    """Train one adapter for each seed, and write all batches to a file if one is named.

    With `kill_at`, the process `engine` is killed while it works on this step.
    """
    chat, found = Chat(AutoTokenizer.from_pretrained(model)), load(questions)
    data = [datum for datum in map(chat.make_sft_datum, found.train) if datum.model_input.length < LONGEST]
    held_out = [chat.make_sft_datum(question) for question in found.held_out[:held_out_rows]]
    results: dict[str, Any] = {}
    chosen = {}
    for seed in seeds:
        examples = shuffle_forever(data, seed)
        chosen[seed] = [list(islice(examples, rows)) for _ in range(steps)]
    if batches:
        written = {seed: [list(map(describe, batch)) for batch in chosen[seed]] for seed in seeds}
        Path(batches).write_text(json.dumps({"held_out": list(map(describe, held_out)), "batches": written}))

    with connect(url) as service:
        for seed in seeds:
            training = create_adapter(service, seed)
            record = results[str(seed)] = {"start": training.save_weights_for_sampler("start").result().path}
            save_progress(results)
            for _ in train(training, chosen[seed], held_out, record, kill_at, engine):
                save_progress(results)
            record["end"] = training.save_weights_for_sampler("end").result().path
            save_progress(results)


def train(
    training: TrainingClient,
    batches: Sequence[Sequence[Datum]],
    held_out: Sequence[Datum],
    record: dict[str, Any],
    kill_at: int | None,
    engine: int | None,
) -> Any:
    """Run a step for each batch, and yield after it; `record` gets losses per answer token and seconds."""
    record |= {"losses": [], "step_s": [], "tokens": [], "held_out": [measure_held_out_nll(training, held_out)]}
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        passed = training.forward_backward(list(batch), "cross_entropy")
        stepped = training.optim_step(AdamParams(**ADAM))
        if step == kill_at and engine is not None:
            time.sleep(0.5)  # let it begin
            os.kill(engine, signal.SIGKILL)

        record["losses"].append(compute_mean_nll(batch, passed.result()))
        stepped.result()
        record["step_s"].append(round(time.perf_counter() - started, 2))
        record["tokens"].append(sum(datum.model_input.length for datum in batch))
        if (step + 1) % EVALUATE_EVERY == 0:
            record["held_out"].append(measure_held_out_nll(training, held_out))
        yield


def describe(datum: Datum) -> dict[str, Any]:
    """Return what train_peft needs of an example."""
    targets, weights = (datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights"))
    return {"inputs": datum.model_input.to_ints(), "targets": targets, "weights": weights}


if __name__ == "__main__":
    main(**read_arguments())
