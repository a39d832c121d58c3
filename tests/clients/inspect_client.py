"""A task of `inspect-ai` against the OpenAI endpoint: `python inspect_client.py URL MODEL`; prints JSON."""

import json
import os
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

URL, MODEL = sys.argv[1:]


def main() -> None:
    os.environ |= {"SKYRL_BASE_URL": f"{URL}/oai/api/v1", "SKYRL_API_KEY": "tml-local"}
    questions = [Sample(input="How many clips?", target="7", id=number) for number in range(3)]
    task = Task(dataset=questions, solver=generate(), scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(
            task,
            model=f"openai-api/skyrl/{MODEL}",
            max_tokens=20,
            seed=5,
            log_dir=folder,
            display="none",
            max_retries=0,
        )
        # Samples are read from the log only when they are accessed.
        assert log.status == "success", log.error
        assert log.samples is not None
        assert len(log.samples) == len(questions)
        texts = [sample.output.completion for sample in log.samples]
        assert len(set(texts)) == 1, "one seed gives one text"
    print(json.dumps({"text": texts[0]}))


main()
