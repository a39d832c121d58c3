"""What the model says to a few held-out questions, to be read by a person."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinker import ModelInput, SamplingClient, SamplingParams

from skyrl_tx.quickstart.chat import Chat
from skyrl_tx.quickstart.questions import Question

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Two answers to one question."""

    question: Question
    greedy: str
    sampled: str

    def lines(self) -> list[str]:
        """Return the lines to print."""
        return [f"  Q: {self.question.text}", f"     greedy   {self.greedy!r}", f"     sampled  {self.sampled!r}"]


def ask(sampler: SamplingClient, chat: Chat, questions: Sequence[Question], seed: int) -> list[Answers]:
    """Ask each question twice: for the likeliest token each time, and at temperature 1."""

    def send(question: Question, temperature: float):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, stop=[chat.turn_end])
        return sampler.sample(ModelInput.from_ints(chat.prompt(question)), num_samples=1, sampling_params=params)

    futures = [(question, send(question, 0.0), send(question, 1.0)) for question in questions]
    return [
        Answers(
            question=question,
            greedy=chat.text(greedy.result().sequences[0]),
            sampled=chat.text(sampled.result().sequences[0]),
        )
        for question, greedy, sampled in futures
    ]
