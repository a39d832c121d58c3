"""A working directory where cookbook recipes find a model and data sets offline, under their public names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.tools.quickstart.model import write_tiny_model
from skyrl_tx.tools.quickstart.training import Question, load_excerpt
from tests.support.client_environments import COOKBOOK, PreparedEnvironment
from tests.support.live_server import LiveServer

MODEL_NAME = "Qwen/Qwen3-8B"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
OTHER_NAMES = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-35B-A3B")  # hard-coded in some recipes
MAX_LENGTH = 8192  # tokens: some prompts are long, and the tiny tokenizer has short tokens
RECIPE = Path(__file__).parent / "run_recipe.py"

# The environments of math_rl and rl_basic add this suffix and a few-shot example to every question.
MATH_SUFFIX = " Write your answer in \\boxed{} format."
EXAMPLE = (
    "How many r's are in strawberry?",
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}",
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingDirectory:
    """A directory with models and data sets, and the client environment whose programs run in it."""

    root: Path
    environment: PreparedEnvironment

    @property
    def model(self) -> Path:
        """The directory of the tiny model, which has the name of a large model."""
        return self.root / MODEL_NAME

    def write_model(self, max_length: int | None = None) -> None:
        """Write the model; `max_length` replaces its `max_position_embeddings`."""
        config = write_tiny_model(self.model) / "config.json"
        if max_length is not None:
            config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": max_length}))

    def write_dataset(self, name: str, config: str = "default", **splits: Sequence[Row]) -> None:
        """Write a data set that `load_dataset(name, config)` finds in this directory."""
        folder = self.root / name
        folder.mkdir(parents=True)
        front = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            front += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (folder / "README.md").write_text("\n".join([*front, "---", ""]))

    def write_lines(self, name: str, rows: Sequence[Row]) -> None:
        """Write a file of JSON lines."""
        (self.root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_conversations(self, conversations: Sequence[Sequence[dict[str, str]]]) -> None:
        """Write the data set that sl_loop and sl_basic read."""
        rows = [{"messages": list(messages)} for messages in conversations]
        self.write_dataset("HuggingFaceH4/no_robots", train=rows, test=rows[:128])

    def write_questions(self, questions: Sequence[Question], held_out: Sequence[Question] = ()) -> None:
        """Write the data set that rl_loop and other recipes read."""
        train, test = (
            [{"question": question.text, "answer": question.answer} for question in part]
            for part in (questions, held_out or questions[:4])
        )
        self.write_dataset("openai/gsm8k", "main", train=train, test=test)

    def make_boxed_prompt(self, row: Question, suffix: str) -> list[dict[str, str]]:
        """Return the prompt of a cookbook GSM8K environment, with the answer that it rewards."""
        question, answer = EXAMPLE
        number = row.answer.split("#### ")[1]
        return [*_chat(question + suffix, answer), *_chat(row.text + suffix, f"\\boxed{{{number}}}")]

    def run(self, recipe: str, url: str, *arguments: str, log: str | None = None) -> list[dict[str, Any]]:
        """Run a recipe and return its metrics, one record per step. Raises RuntimeError if it fails.

        `log` names the directory of its metrics; the default is the recipe's name.
        """
        folder = self.log(log or recipe)
        self.run_module(f"recipes.{recipe}", url, f"model_name={MODEL_NAME}", f"log_path={folder}", *arguments)
        return self.metrics(log or recipe)

    def metrics(self, recipe: str) -> list[dict[str, Any]]:
        """Return the metrics of a run, one record per step."""
        return _read_lines(self.log(recipe) / "metrics.jsonl")

    def run_module(self, module: str, url: str, *arguments: str, stdin: str = "") -> str:
        """Run a module of the cookbook as a program and return its standard output."""
        return self.run_program(RECIPE.name, url, module, *arguments, stdin=stdin)

    def run_program(self, program: str, url: str, *arguments: str, stdin: str = "") -> str:
        """Run a program of tests/recipes in the directory and return its standard output."""
        variables = {
            **OFFLINE,
            **self.environment.variables,
            "HF_HOME": str(self.root / "cache"),
            "TINKER_BASE_URL": url,
            "TINKER_COOKBOOK_RUNS_DIR": str(self.root / "runs"),
        }
        environment = replace(self.environment, variables=variables)
        script = Path(__file__).parent / program
        return environment.run(script, *arguments, cwd=self.root, timeout_s=900.0, stdin=stdin).stdout

    def log(self, recipe: str) -> Path:
        """Return the directory of a recipe's metrics and checkpoints."""
        return self.root / "logs" / recipe

    def last_checkpoint(self, recipe: str) -> str:
        """Return the path of the newest training checkpoint that a recipe saved."""
        return _read_lines(self.log(recipe) / "checkpoints.jsonl")[-1]["state_path"]

    def start_from(self, recipe: str, state_path: str) -> None:
        """Write a checkpoint record so that the recipe resumes from that checkpoint at step 0."""
        log = self.log(recipe)
        log.mkdir(parents=True)
        record = {"name": "start", "batch": 0, "state_path": state_path}
        (log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")


def write_inputs(place: WorkingDirectory) -> None:
    """Write the data sets of all recipes, with a few rows each."""
    place.write_model(MAX_LENGTH)
    for name in OTHER_NAMES:
        (place.root / name).symlink_to(place.model)
    excerpt = load_excerpt()
    questions = excerpt.train[:32]

    texts = [row.text for row in questions]
    chats = [_chat(row.text, row.answer) for row in questions]
    place.write_questions(questions[:8], excerpt.held_out[:4])
    place.write_conversations(chats * 4)
    place.write_lines("chats.jsonl", [{"messages": chat} for chat in chats])
    sums = [_sum(x, y) for x in range(0, 100, 7) for y in range(0, 100, 11)] + [
        place.make_boxed_prompt(row, MATH_SUFFIX) for row in questions
    ] * 2
    place.write_lines("sums.jsonl", [{"messages": row} for row in sums])

    pairs = [
        {
            "chosen": f"\n\nHuman: {row.text}\n\nAssistant: {row.answer}",
            "rejected": f"\n\nHuman: {row.text}\n\nAssistant: No.",
        }
        for row in questions
    ]

    place.write_dataset("Anthropic/hh-rlhf", train=pairs, test=pairs[:4])
    place.write_dataset("zwhe99/DeepMath-103K", train=[{"question": text} for text in texts])
    place.write_dataset("allenai/tulu-3-sft-mixture", train=[{"messages": chat} for chat in chats])
    thoughts = [[{"from": "human", "value": row.text}, {"from": "gpt", "value": row.answer}] for row in questions]
    place.write_dataset("open-thoughts/OpenThoughts3-1.2M", train=[{"conversations": rows} for rows in thoughts])
    place.write_dataset("hicai-zju/SciKnowEval", test=[_exam(row) for row in questions])
    pages = [{"text": f"{row.text} {row.answer}"} for row in excerpt.train]
    place.write_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", train=pages * 10)

    rubric = {
        "rubric_str": "Is it right?",
        "extraction_regex": "<score>(.*?)</score>",
        "grader_output_format_instruction": "Say <score>0</score> or <score>1</score>.",
    }
    place.write_lines("rubric.jsonl", [{"convo": _chat(text)[:1], "rubric_items": [rubric]} for text in texts])
    sentences = place.root / "tinker_cookbook" / "example_data" / "multilingual.txt"
    sentences.parent.mkdir(parents=True)
    sentences.write_text("\n".join(["Guten Tag, wie geht es dir?", "Where is the house?"]))


def _chat(question: str, answer: str = "") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _sum(x: int, y: int) -> list[dict[str, str]]:
    """Return a conversation like the conversations of math_rl's arithmetic environment."""
    return [*_chat("What is 4 + 5?", "9"), *_chat(f"What is {x} + {y}?", str(x + y))]


def _exam(row: Question) -> dict[str, Any]:
    right = row.answer.split("#### ")[1]
    return {
        "domain": "Chemistry",
        "details": {"level": "L3"},
        "type": "mcq-4-choices",
        "question": row.text,
        "choices": {"label": ["A", "B"], "text": [right, "none"]},
        "answerKey": "A",
    }


@pytest.fixture(scope="session")
def recipes_directory(client_environment, tmp_path_factory):
    """A working directory with the data sets of all recipes."""
    place = WorkingDirectory(root=tmp_path_factory.mktemp("recipes") / "work", environment=client_environment(COOKBOOK))
    write_inputs(place)
    return place


@pytest.fixture(scope="session")
def recipes_server_url(recipes_directory, tmp_path_factory):
    """The URL of a server for all recipes, with an alias for each model name that they use."""
    flags = (
        *("--base-model", str(recipes_directory.model)),
        *("--served-model-name", MODEL_NAME),
        *("--served-model-aliases", ",".join(OTHER_NAMES)),
        *("--backend-config.max-lora-rank", "128"),
    )
    with LiveServer(tmp_path_factory.mktemp("server"), flags=flags) as server:
        yield server.url


@pytest.fixture
def working_directory(client_environment, tmp_path):
    place = WorkingDirectory(root=tmp_path / "work", environment=client_environment(COOKBOOK))
    place.write_model()
    return place


@pytest.fixture
def server(working_directory, tmp_path):
    flags = ("--base-model", str(working_directory.model), "--served-model-name", MODEL_NAME)
    with LiveServer(tmp_path / "server", flags=flags) as server:
        yield server


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
