"""The questions: GSM8K for supervised training and comparisons, and sums for reinforcement learning."""

import random
from pathlib import Path

from skyrl_tx.tools.quickstart.training import Question, QuestionSet, load_excerpt, load_questions

LARGEST = 99
"""Both numbers of a sum are at most this large."""
ODD_TEXTS = (
    "naïve café – 東京の天気は? 🙂👩‍👩‍👧‍👦🇫🇷 ½ ≠ ∑ 𝒳 end\n\ttab",
    "  two  spaces   three 12345.678 $9,999",
)
"""Texts whose tokens are rare: characters of several bytes, white space and long numbers."""
CONVERSATIONS = (
    [
        {"role": "system", "content": "You answer in French. 🙂"},
        {"role": "user", "content": "What is 2 + 3?"},
    ],
    [
        {"role": "user", "content": "Hi 👋🏽"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "  count:\n1, 2,  "},
    ],
)
"""Conversations that a chat template can render wrongly."""


def load(path: str | None) -> QuestionSet:
    """Read a file of questions, or the excerpt of GSM8K that is part of the package."""
    return load_questions(Path(path)) if path else load_excerpt()


def draw_sums(count: int, seed: int) -> list[Question]:
    """Return questions such as "What is 47 + 38?", with the number as answer. Equal seeds give equal questions."""
    generator = random.Random(seed)
    questions = []
    for _ in range(count):
        first, second = generator.randint(1, LARGEST), generator.randint(1, LARGEST)
        text = f"What is {first} + {second}? Answer with the number only."
        questions.append(Question(text, str(first + second)))
    return questions
