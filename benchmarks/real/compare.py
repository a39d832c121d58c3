"""Scores texts and continues prompts through the SDK and the OpenAI endpoint, and compares this with transformers."""

import json
import urllib.request
from typing import Any

import numpy as np
from tinker import Datum, ModelInput, SamplingParams
from transformers import AutoTokenizer

from benchmarks.gpu_rl.client import connect, create_adapter
from benchmarks.gpu_rl.progress import read_arguments, save_progress
from benchmarks.real.questions import CONVERSATIONS, ODD_TEXTS, load


def main(
    url: str, model: str, questions: str | None, rows: int, prompts: int, max_tokens: int, checkpoint: str | None = None
) -> None:
    """Score `rows` texts with the base model or a checkpoint, and continue `prompts` prompts with the base model."""
    tokenizer, found = AutoTokenizer.from_pretrained(model), load(questions).held_out
    texts = [f"{question.text}\n{question.answer}" for question in found[:rows]] + list(ODD_TEXTS)
    sequences = [tokenizer.encode(text) for text in texts]
    results: dict[str, Any] = {"sequences": sequences, "prompts": [], "greedy": [], "end_token": tokenizer.eos_token_id}

    with connect(url) as service:
        (served,) = service.get_server_capabilities().supported_models
        name = served.model_name
        assert name is not None
        base_model = None if checkpoint else name
        sampler = service.create_sampling_client(model_path=checkpoint, base_model=base_model).result()
        scores = [sampler.compute_logprobs(ModelInput.from_ints(tokens)) for tokens in sequences]
        results["logprobs"] = [score.result()[1:] for score in scores]
        save_progress(results)
        if not prompts:
            return

        # Score the same texts with the forward pass of training. The new adapter changes nothing.
        output = create_adapter(service).forward([make_datum(tokens) for tokens in sequences], "cross_entropy").result()
        results["forward_logprobs"] = [list(row["logprobs"].data) for row in output.loss_fn_outputs]
        save_progress(results)

        # Continue prompts, and answer conversations in the model's own format if it has one.
        results["prompts"] = [tokenizer.encode(f"Question: {q.text}\nAnswer:") for q in found[:prompts]]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        futures = [sampler.sample(ModelInput.from_ints(prompt), 1, params) for prompt in results["prompts"]]
        results["greedy"] = [list(future.result().sequences[0].tokens) for future in futures]
        save_progress(results)

    if tokenizer.chat_template:
        conversations = [[{"role": "user", "content": q.text}] for q in found[:prompts]] + list(CONVERSATIONS)
        results["chat"] = {"prompts": len(conversations), "rendered_as_transformers": 0}
        for messages in conversations:
            body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
            reply = post(f"{url}/v1/chat/completions", {"model": name, **body})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            results["chat"]["rendered_as_transformers"] += reply["prompt_token_ids"] == prompt
            results["prompts"].append(prompt)
            results["greedy"].append(reply["choices"][0]["token_ids"])
            save_progress(results)


def make_datum(tokens: list[int]) -> Datum:
    """Return a text as an example in which every token counts."""
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # type: ignore[arg-type]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def compare_logprobs(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, Any]:
    """Return how far two sets of log-probabilities of the same tokens are apart, and both mean losses."""
    first, second = np.concatenate(ours), np.concatenate(theirs)
    gaps = np.abs(first - second)
    return {
        "tokens": len(gaps),
        "median_gap": float(f"{np.median(gaps):.2g}"),
        "largest_gap": float(f"{gaps.max():.2g}"),
        "nll": round(-first.mean(), 6),
        "nll_of_transformers": round(-second.mean(), 6),
        "gaps": [float(f"{gap:.2g}") for gap in np.quantile(gaps, np.linspace(0, 1, 101))],
    }


def compare_all(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of the server to transformers."""
    passes = {name: ours[name] for name in ("logprobs", "forward_logprobs") if name in ours}
    results = {name: compare_logprobs(scores, theirs["logprobs"]) for name, scores in passes.items()}
    equal = sum(mine == other for mine, other in zip(ours["greedy"], theirs["greedy"], strict=True))
    return {**results, "greedy": {"prompts": len(ours["greedy"]), "equal": equal}, "chat": ours.get("chat")}


if __name__ == "__main__":
    main(**read_arguments())
