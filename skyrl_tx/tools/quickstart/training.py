"""The questions of the quickstart, and its training: supervised fine-tuning, then reinforcement learning.

Reinforcement learning rewards only the format of an answer, because a tiny model can learn the format from its own
samples: the answer must end within a budget of tokens, with the line `#### <number>`. The number need not be right.
Each step also trains on worked answers, with a small weight. Otherwise the model would soon write nothing but a result
line. Ouyang et al. 2022, arXiv:2203.02155, mix such a loss into reinforcement learning for the same reason.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, StringConstraints, ValidationError
from tinker import AdamParams, Datum, ModelInput, SampledSequence, SamplingClient, SamplingParams, TrainingClient
from tinker.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizer

T = TypeVar("T")

HELD_OUT_SHARE = 10  # in a file without splits, every tenth row is held out

# Cobbe et al. 2021, arXiv:2110.14168: the first rows of the train and test splits whose question has at most 170 and
# whose answer at most 130 characters, unchanged. Licence: LICENSE-GSM8K.
EXCERPT = "gsm8k_excerpt.jsonl"

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]

SFT_BATCH_SIZE = 16
# Measured on the tiny model. Its base weights are random, so it needs a hundred times the usual rate.
SFT_LEARNING_RATE = 1e-2
SFT_WARMUP_STEPS = 5
RL_NUM_GROUPS = 8  # questions per step
RL_GROUP_SIZE = 8  # answers per question
RL_LEARNING_RATE = 4e-3
RL_SFT_WEIGHT = 0.3  # of each token of the worked answers that a step also trains on
MAX_TOKENS = 64  # per answer; worked answers have 61 on average
END_REWARD = 0.1
REWARD_TEXT = f"{END_REWARD} for ending within {MAX_TOKENS} tokens, 1 if the last line is '#### <number>'"
_RESULT_LINE = re.compile(r"^#### -?\d[\d,]*(?:\.\d+)?\Z", re.MULTILINE)


class QuestionFileError(ValueError):
    """A question file is invalid. The message names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and a worked answer whose last line is `#### <number>`."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions to train on and held-out questions."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


class _Row(BaseModel):
    question: Text
    answer: Text
    split: Literal["train", "test"] | None = None


def load_excerpt() -> QuestionSet:
    """Load the excerpt of GSM8K that is part of the package."""
    return load_questions(files("skyrl_tx.tools.quickstart") / EXCERPT)


def load_questions(path: Path | Traversable) -> QuestionSet:
    """Read a file with one JSON object per line: `question`, `answer` and optionally `split` ("train" or "test").

    Raises QuestionFileError for an invalid line, or if no questions are left to train on or to hold out.
    """
    # Read the file.
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionFileError(f"{path}: {error}") from error

    # Parse and split its lines.
    train: list[Question] = []
    held_out: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _Row.model_validate_json(line)
        except ValidationError as error:
            field = error.errors()[0]
            name = "".join(f"{part!r}: " for part in field["loc"])
            raise QuestionFileError(f"{path}, line {number}: {name}{field['msg']}, not {field['input']!r}") from error
        split = row.split or ("test" if number % HELD_OUT_SHARE == 0 else "train")
        (train if split == "train" else held_out).append(Question(row.question, row.answer))

    if not train or not held_out:
        raise QuestionFileError(
            f"{path}: {len(train)} rows to train on and {len(held_out)} to hold out; both are needed "
            f"(without 'split', every {HELD_OUT_SHARE}th row is held out)"
        )
    return QuestionSet(train=tuple(train), held_out=tuple(held_out))


@dataclass(frozen=True)
class Chat:
    """Converts between text and tokens. A conversation is one question and one answer in Qwen's chat format."""

    tokenizer: "PreTrainedTokenizer"

    @cached_property
    def turn_end_token(self) -> int:
        """The token that ends an answer."""
        return self.encode("<|im_end|>")[0]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, special tokens included."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(self, question: Question) -> list[int]:
        """Return the prompt tokens of a question."""
        return self.encode(f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n")

    def make_sft_datum(self, question: Question, weight: float = 1.0) -> Datum:
        """Return a prompt and its worked answer as a training example. Prompt tokens have weight 0."""
        prompt, answer = self.encode_prompt(question), [*self.encode(question.answer), self.turn_end_token]
        tokens = prompt + answer
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(prompt) - 1 :] = weight
        return Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},  # type: ignore[dict-item]
        )

    def decode_text(self, sequence: SampledSequence) -> str:
        """Return the text of a sample, without the token that ended it."""
        tokens = sequence.tokens[:-1] if sequence.tokens[-1:] == [self.turn_end_token] else sequence.tokens
        text = self.tokenizer.decode(tokens)
        assert isinstance(text, str)
        return text


def shuffle_forever(items: Sequence[T], seed: int) -> Iterator[T]:
    """Yield the items again and again, in a new random order each time. Equal seeds give equal orders."""
    generator = random.Random(seed)
    while True:
        epoch = list(items)
        generator.shuffle(epoch)
        yield from reversed(epoch)


def train_sft(client: TrainingClient, data: Sequence[Datum], num_steps: int, seed: int) -> Iterator[float]:
    """Run supervised steps on shuffled batches. Yields the loss of each batch before its update, in nats per token."""
    shuffled_data = shuffle_forever(data, seed)
    for step in range(num_steps):
        batch = list(islice(shuffled_data, SFT_BATCH_SIZE))
        warmup = min(1.0, (step + 1) / SFT_WARMUP_STEPS)
        rate = SFT_LEARNING_RATE * warmup * (1 - step / num_steps)
        # Send both requests before waiting for the first result, so that the server is not idle in between.
        gradient = client.forward_backward(batch, "cross_entropy")
        update = client.optim_step(AdamParams(learning_rate=rate))
        nll = compute_mean_nll(batch, gradient.result())
        update.result()
        yield nll


def measure_held_out_nll(client: TrainingClient, data: Sequence[Datum]) -> float:
    """Return the loss on held-out examples, in nats per answer token."""
    return compute_mean_nll(data, client.forward(list(data), "cross_entropy").result())


def compute_mean_nll(data: Sequence[Datum], output: ForwardBackwardOutput) -> float:
    """Return the mean negative log-likelihood over the answer tokens of a pass."""
    weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in data]
    logprobs = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
    total = sum(float(np.dot(w, p)) for w, p in zip(weights, logprobs, strict=True))
    return -total / sum(float(w.sum()) for w in weights)


def train_rl(
    client: TrainingClient, chat: Chat, questions: Sequence[Question], num_steps: int, seed: int
) -> Iterator[tuple[float, int]]:
    """Run policy gradient steps on groups of sampled answers.

    The advantage of an answer is its reward minus the mean reward of its group. Groups in which all rewards are equal
    are skipped. Yields, for each step, the mean reward before the update and the number of sampled answers trained on.
    """
    shuffled_questions = shuffle_forever(questions, seed)
    worked_answers = shuffle_forever([chat.make_sft_datum(question, RL_SFT_WEIGHT) for question in questions], seed)
    for step in range(num_steps):
        # Sample answers with the current weights and compute their rewards.
        sampler = client.save_weights_and_get_sampling_client().result()
        asked = list(islice(shuffled_questions, RL_NUM_GROUPS))
        groups = sample_groups(sampler, chat, asked, RL_GROUP_SIZE, seed + step * RL_NUM_GROUPS)
        rewards = [[compute_reward(chat, sequence) for sequence in group] for group in groups]

        # Train on the answers, and on worked answers. The gradients of both passes are added.
        batch = [
            make_rl_datum(chat.encode_prompt(question), sequence, value - float(np.mean(values)))
            for question, group, values in zip(asked, groups, rewards, strict=True)
            if len(set(values)) > 1  # with equal rewards all advantages are 0
            for sequence, value in zip(group, values, strict=True)
        ]
        passes = [client.forward_backward(list(islice(worked_answers, SFT_BATCH_SIZE)), "cross_entropy")]
        if batch:
            passes.append(client.forward_backward(batch, "importance_sampling"))
        update = client.optim_step(AdamParams(learning_rate=RL_LEARNING_RATE))
        for gradient in passes:
            gradient.result()
        update.result()

        yield float(np.mean(rewards)), len(batch)


def compute_reward(chat: Chat, sequence: SampledSequence) -> float:
    """Return the reward of an answer.

    The reward is 1 if the answer ends within the token budget with the line `#### <number>`, 0.1 if the answer ends
    within the budget with another line, and 0 if it does not end. Without the reward for ending, the model would soon
    write only such lines and never end, and then no sample would teach it to end. With a high reward for ending, it
    would learn little else.
    """
    if sequence.stop_reason != "stop":
        return 0.0
    return 1.0 if _RESULT_LINE.search(chat.decode_text(sequence)) else END_REWARD


def measure_mean_reward(sampler: SamplingClient, chat: Chat, questions: Sequence[Question], seed: int) -> float:
    """Return the mean reward over four sampled answers per question."""
    groups = sample_groups(sampler, chat, questions, 4, seed)
    return float(np.mean([[compute_reward(chat, sequence) for sequence in group] for group in groups]))


def sample_groups(
    sampler: SamplingClient,
    chat: Chat,
    questions: Iterable[Question],
    group_size: int,
    seed: int,
    temperature: float = 1.0,
) -> list[list[SampledSequence]]:
    """Sample `group_size` answers per question. All requests are sent before the first result is awaited."""
    futures = [
        sampler.sample(
            ModelInput.from_ints(chat.encode_prompt(question)),
            num_samples=group_size,
            sampling_params=SamplingParams(
                max_tokens=MAX_TOKENS, temperature=temperature, seed=seed + index, stop=[chat.turn_end_token]
            ),
        )
        for index, question in enumerate(questions)
    ]
    return [list(future.result().sequences) for future in futures]


def make_rl_datum(prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    """Return a sampled answer as a training example with the sampler's logprobs. Prompt tokens have advantage 0."""
    tokens = [*prompt, *sequence.tokens]
    assert sequence.logprobs is not None
    padding = [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],  # type: ignore[dict-item]
            "logprobs": padding + list(sequence.logprobs),  # type: ignore[dict-item]
            "advantages": padding + [advantage] * len(sequence.tokens),  # type: ignore[dict-item]
        },
    )


def format_answers(sampler: SamplingClient, chat: Chat, questions: Sequence[Question], seed: int) -> Iterator[str]:
    """Yield lines to print: each question with a greedy answer and an answer at temperature 1."""
    greedy = sample_groups(sampler, chat, questions, 1, seed, temperature=0.0)
    sampled = sample_groups(sampler, chat, questions, 1, seed)
    for question, (first,), (second,) in zip(questions, greedy, sampled, strict=True):
        yield f"  Q: {question.text}"
        yield f"     greedy   {chat.decode_text(first)!r}"
        yield f"     sampled  {chat.decode_text(second)!r}"
