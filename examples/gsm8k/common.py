"""Code shared by the four scripts: flags, prompts, and parsing of answers."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker

from skyrl_tx.tools.quickstart.training import Question, QuestionSet, load_excerpt, load_questions

INSTRUCTION = " Work it out step by step. End with a line of the form '#### <number>'."
NUMBER = re.compile(r"#### (-?[\d,]*\.?\d+)")


def flags(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags of all scripts that connect to a server."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-local"), help="key for the server")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="base model, as the server names it")
    parser.add_argument("--tokenizer", help="hub id or directory of the tokenizer, if it is not the model's name")
    parser.add_argument("--data", type=Path, help="GSM8K as JSON lines; without it, the excerpt of skyrl_tx")
    parser.add_argument("--seed", type=int, default=0, help="seed of adapter, order and samples")
    return parser


def connect(args: argparse.Namespace) -> tinker.ServiceClient:
    """Connect to the server."""
    return tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key)


def questions(path: Path | None) -> QuestionSet:
    """Read the training questions and the test questions."""
    return load_questions(path) if path else load_excerpt()


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Load the tokenizer of the model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # do not warn about a missing torch; it is not used
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(args.tokenizer or args.model)


def prompt(tokenizer: Any, question: Question) -> list[int]:
    """Return the prompt tokens of a question."""
    messages = [{"role": "user", "content": question.text + INSTRUCTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def number(answer: str) -> str | None:
    """Return the final number of an answer in normal form, or None if no line has the requested format."""
    found = NUMBER.findall(answer)
    return f"{float(found[-1].replace(',', '')):g}" if found else None


def batch(items: Sequence[Question], step: int, size: int) -> list[Question]:
    """Return the questions of one step; the order is cyclic."""
    return [items[(step * size + index) % len(items)] for index in range(size)]
