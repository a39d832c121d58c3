"""Questions with worked answers: an excerpt of GSM8K in the package, or a file in the same format."""

from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, StringConstraints, ValidationError

HELD_OUT_SHARE = 10  # in a file without splits, every tenth row is held out

# Cobbe et al. 2021, arXiv:2110.14168: the first rows whose question has at most 170 and whose answer at most 130
# characters, of the train and of the test split, unchanged. Licence: LICENSE-GSM8K.
EXCERPT = "gsm8k_excerpt.jsonl"

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class QuestionFileError(ValueError):
    """A question file is invalid; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and a worked answer whose last line is `#### <number>`."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Training questions and held-out questions."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


class _Row(BaseModel):
    question: Text
    answer: Text
    split: Literal["train", "test"] | None = None


def load_excerpt() -> QuestionSet:
    """Return the excerpt in the package."""
    return load_questions(files("skyrl_tx.tools.quickstart") / EXCERPT)


def load_questions(path: Path | Traversable) -> QuestionSet:
    """Read a file with one JSON object per line: `question`, `answer` and optionally `split` ("train" or "test").

    Raises QuestionFileError for an invalid line, or if there are no training or no held-out questions.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionFileError(f"{path}: {error}") from error
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
