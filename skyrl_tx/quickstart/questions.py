"""Questions with worked answers: the GSM8K excerpt that ships with the package, or a file of the same form."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

HELD_OUT_SHARE = 10  # of a file without splits, every tenth row is held out

# Cobbe et al. 2021, arXiv:2110.14168: the first rows whose question has at most 170 and whose answer at most 130
# characters, of the train and of the test split, unchanged. Licence: LICENSE-GSM8K.
EXCERPT = "gsm8k_excerpt.jsonl"


class QuestionFileError(ValueError):
    """A line of a question file cannot be read; the text names file, line and field."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and a worked answer whose last line is `#### <number>`."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions to train on, and questions that training never sees."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


def load_excerpt() -> QuestionSet:
    """Return the excerpt that ships with the package."""
    text = (files("skyrl_tx.quickstart") / EXCERPT).read_text(encoding="utf-8")
    return parse_questions(text.splitlines(), EXCERPT)


def load_questions(path: Path) -> QuestionSet:
    """Read a file of one JSON object a line: `question`, `answer` and, if it likes, `split` ("train" or "test").

    Raises QuestionFileError for a line that is not so, or when either part would be empty.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionFileError(f"{path}: {error}") from error
    return parse_questions(lines, str(path))


def parse_questions(lines: Iterable[str], name: str) -> QuestionSet:
    """Do what `load_questions` does with the lines of the file called `name`."""
    train: list[Question] = []
    held_out: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        question, split = _parse_line(line, where)
        if split is None:
            split = "test" if number % HELD_OUT_SHARE == 0 else "train"
        (train if split == "train" else held_out).append(question)
    if not train or not held_out:
        raise QuestionFileError(
            f"{name}: {len(train)} rows to train on and {len(held_out)} to hold out; both are needed "
            f"(without 'split', every {HELD_OUT_SHARE}th row is held out)"
        )
    return QuestionSet(train=tuple(train), held_out=tuple(held_out))


def _parse_line(line: str, where: str) -> tuple[Question, str | None]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise QuestionFileError(f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise QuestionFileError(f"{where}: not a JSON object")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise QuestionFileError(f"{where}: {field!r} must be text, not {row.get(field)!r}")
    split = row.get("split")
    if split not in (None, "train", "test"):
        raise QuestionFileError(f"{where}: 'split' must be 'train' or 'test', not {split!r}")
    return Question(row["question"].strip(), row["answer"].strip()), split
