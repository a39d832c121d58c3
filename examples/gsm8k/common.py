"""What the four scripts share: their common flags, questions as prompts, numbers out of answers."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker

from skyrl_tx.quickstart.questions import Question, QuestionSet, load_excerpt, load_questions

INSTRUCTION = " Work it out step by step. End with a line of the form '#### <number>'."
NUMBER = re.compile(r"#### (-?[\d,]*\.?\d+)")


def flags(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all scripts have that speak to a server."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-local"), help="key for the server")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="base model, by the name it is served under")
    parser.add_argument("--tokenizer", help="hub id or directory of the tokenizer, if it is not the model's name")
    parser.add_argument("--data", type=Path, help="GSM8K as JSON lines; without it, the excerpt of skyrl_tx")
    parser.add_argument("--seed", type=int, default=0, help="seed of adapter, order and samples")
    return parser


def connect(args: argparse.Namespace) -> tinker.ServiceClient:
    """Return a client of the server."""
    return tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key)


def questions(path: Path | None) -> QuestionSet:
    """Read the questions to train on, and those to test on."""
    return load_questions(path) if path else load_excerpt()


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Load the tokenizer of the model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would tell that there is no torch; none is needed
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(args.tokenizer or args.model)


def prompt(tokenizer: Any, question: Question) -> list[int]:
    """Return the tokens after which the model is to answer."""
    messages = [{"role": "user", "content": question.text + INSTRUCTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def number(answer: str) -> str | None:
    """Return the number that an answer ends with, in one spelling; None without a line that holds one."""
    found = NUMBER.findall(answer)
    return f"{float(found[-1].replace(',', '')):g}" if found else None


def batch(items: Sequence[Question], step: int, size: int) -> list[Question]:
    """Return the questions of a step: in order, and from the beginning again after the last."""
    return [items[(step * size + index) % len(items)] for index in range(size)]
