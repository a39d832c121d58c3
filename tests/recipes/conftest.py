"""A folder in which the cookbook finds, offline and under their public names, a model and all that its recipes read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.quickstart.questions import Question, load_excerpt
from skyrl_tx.quickstart.tiny_model import write_tiny_model
from skyrl_tx.testing.client_environments import COOKBOOK, PreparedEnvironment
from skyrl_tx.testing.live_server import LiveServer

MODEL_NAME = "Qwen/Qwen3-8B"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
OTHER_NAMES = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-35B-A3B")  # those that some recipes insist on
MAX_LENGTH = 8192  # tokens: some recipes bring long prompts, and the tiny tokenizer makes them longer
RECIPE = Path(__file__).parent / "run_recipe.py"

# What the cookbook's GSM8K environments put before and after every question.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The folder, and the environment whose programs run in it."""

    root: Path
    environment: PreparedEnvironment

    @property
    def model(self) -> Path:
        """Where the tiny model lies, under the name of a large one."""
        return self.root / MODEL_NAME

    def write_model(self, max_length: int | None = None) -> None:
        """Make the model; `max_length` replaces the longest context that it says it can read."""
        config = write_tiny_model(self.model) / "config.json"
        if max_length is not None:
            config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": max_length}))

    def write_dataset(self, name: str, config: str = "default", **splits: Sequence[Row]) -> None:
        """Write a data set so that `load_dataset(name, config)` finds it in this folder."""
        folder = self.root / name
        folder.mkdir(parents=True)
        front = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            front += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (folder / "README.md").write_text("\n".join([*front, "---", ""]))

    def write_lines(self, name: str, rows: Sequence[Row]) -> None:
        """Write a file of one JSON object a line."""
        (self.root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_conversations(self, conversations: Sequence[Sequence[dict[str, str]]]) -> None:
        """Write the data set that sl_loop and sl_basic read."""
        rows = [{"messages": list(messages)} for messages in conversations]
        self.write_dataset("HuggingFaceH4/no_robots", train=rows, test=rows[:128])

    def write_questions(self, questions: Sequence[Question], held_out: Sequence[Question] = ()) -> None:
        """Write the data set that rl_loop and others read."""
        train, test = (
            [{"question": question.text, "answer": question.answer} for question in part]
            for part in (questions, held_out or questions[:4])
        )
        self.write_dataset("openai/gsm8k", "main", train=train, test=test)

    def boxed(self, row: Question) -> list[dict[str, str]]:
        """What the cookbook's GSM8K environments ask, and the answer that they reward."""
        number = row.answer.split("#### ")[1]
        return [*EXAMPLE, *_chat(row.text + SUFFIX, f"\\boxed{{{number}}}")]

    def run(self, recipe: str, url: str, *arguments: str, log: str | None = None) -> list[dict[str, Any]]:
        """Run a recipe to its end and return its metrics, one record a step; raises RuntimeError when it fails.

        `log` names the folder of its metrics, where it is not to be the recipe's own name.
        """
        folder = self.log(log or recipe)
        self.run_module(f"recipes.{recipe}", url, f"model_name={MODEL_NAME}", f"log_path={folder}", *arguments)
        return _read_lines(folder / "metrics.jsonl")

    def run_module(self, module: str, url: str, *arguments: str, stdin: str = "") -> str:
        """Run a module of the cookbook as a program; return what it printed."""
        return self.run_program(RECIPE.name, url, module, *arguments, stdin=stdin)

    def run_program(self, program: str, url: str, *arguments: str, stdin: str = "") -> str:
        """Run a program that lies beside this file, in the folder; return what it printed."""
        variables = OFFLINE | {
            "HF_HOME": str(self.root / "cache"),
            "TINKER_BASE_URL": url,
            "TINKER_COOKBOOK_RUNS_DIR": str(self.root / "runs"),
        }
        environment = replace(self.environment, variables=variables)
        script = Path(__file__).parent / program
        return environment.run(script, *arguments, cwd=self.root, timeout_s=900.0, stdin=stdin).stdout

    def log(self, recipe: str) -> Path:
        """Return the folder of a recipe's metrics and checkpoints."""
        return self.root / "logs" / recipe

    def last_checkpoint(self, recipe: str) -> str:
        """Return the path of the newest training checkpoint that a recipe saved."""
        return _read_lines(self.log(recipe) / "checkpoints.jsonl")[-1]["state_path"]

    def start_from(self, recipe: str, state_path: str) -> None:
        """Let a recipe find a checkpoint to go on from, as if it had saved it itself before its first step."""
        log = self.log(recipe)
        log.mkdir(parents=True)
        record = {"name": "start", "batch": 0, "state_path": state_path}
        (log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")


def furnish(place: Workplace) -> None:
    """Write what the recipes read, cut down to a few rows each."""
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
    lessons = [_sum(x, y) for x in range(0, 100, 7) for y in range(0, 100, 11)] + [
        place.boxed(row) for row in questions
    ] * 2
    place.write_lines("lessons.jsonl", [{"messages": lesson} for lesson in lessons])
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
    """What math_rl asks of arithmetic."""
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
def furnished(client_environment, tmp_path_factory):
    """Give a workplace with all that the recipes read."""
    place = Workplace(root=tmp_path_factory.mktemp("recipes") / "work", environment=client_environment(COOKBOOK))
    furnish(place)
    return place


@pytest.fixture(scope="session")
def long_server(furnished, tmp_path_factory):
    """Give the address of a server for all recipes, which answers to every name that they ask for."""
    flags = (
        *("--base-model", str(furnished.model)),
        *("--served-model-name", MODEL_NAME),
        *("--served-model-aliases", ",".join(OTHER_NAMES)),
        *("--backend-config.max-lora-rank", "128"),
    )
    with LiveServer(tmp_path_factory.mktemp("server"), flags=flags) as server:
        yield server.url


@pytest.fixture
def workplace(client_environment, tmp_path):
    place = Workplace(root=tmp_path / "work", environment=client_environment(COOKBOOK))
    place.write_model()
    return place


@pytest.fixture
def server(workplace, tmp_path):
    flags = ("--base-model", str(workplace.model), "--served-model-name", MODEL_NAME)
    with LiveServer(tmp_path / "server", flags=flags) as server:
        yield server


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
