"""An Inspect task of two sums, for `run_inspect_evals`."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums() -> Task:
    samples = [Sample(input="What is 4 + 5?", target="9"), Sample(input="What is 2 + 2?", target="4")]
    return Task(dataset=MemoryDataset(samples, name="sums"), solver=generate(), scorer=includes())
