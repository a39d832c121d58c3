"""Run the cookbook's evaluators and its checkpoint manager: `evaluations.py SAMPLER_PATH`.

Prints the results as JSON.
"""

import asyncio
import json
import sys
import warnings
from pathlib import Path

import tinker
from tinker_cookbook import checkpoint_utils
from tinker_cookbook.eval.benchmark_evaluator import BenchmarkEvaluator
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.nll_evaluator import NLLEvaluator, SamplerNLLEvaluator
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL_NAME = "Qwen/Qwen3-8B"
LOG = "logs/checkpoint_manager"


async def main(sampler_path: str) -> None:
    service = tinker.ServiceClient()
    renderer = get_renderer(get_recommended_renderer_name(MODEL_NAME), get_tokenizer(MODEL_NAME))
    trained = await service.create_sampling_client_async(model_path=sampler_path, base_model=MODEL_NAME)
    benchmark = await BenchmarkEvaluator("gsm8k", renderer, max_examples=4, max_tokens=16)(trained)

    training = await service.create_lora_training_client_async(MODEL_NAME, rank=8)
    messages = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    data = [conversation_to_datum(messages, renderer, 512)]
    Path(LOG).mkdir(parents=True)
    manager = checkpoint_utils.CheckpointManager(training, service, LOG, save_every=2, rolling_save_every=1)

    for step in range(1, 4):
        passed = await training.forward_backward_async(data, "cross_entropy")
        stepped = await training.optim_step_async(tinker.AdamParams(learning_rate=1e-3))
        await passed
        await stepped
        await manager.maybe_save_async(step, {"batch": step})

    await manager.save_final_async({"batch": 3})
    with warnings.catch_warnings(action="ignore"):
        nll = await NLLEvaluator(data)(training)
    sampler = await training.save_weights_and_get_sampling_client_async()
    sampler_nll = await SamplerNLLEvaluator(data)(sampler)
    rows = [json.loads(line) for line in Path(LOG, "checkpoints.jsonl").read_text().splitlines()]
    listed = await service.create_rest_client().list_checkpoints_async(training.model_id)

    print(
        json.dumps(
            {
                "benchmark": benchmark,
                "nll": nll["test/nll"],
                "sampler_nll": sampler_nll["test/nll"],
                "checkpoints": [row["name"] for row in rows],
                "left": sorted({row.checkpoint_id.partition("/")[2] for row in listed.checkpoints}),
            }
        )
    )


asyncio.run(main(sys.argv[1]))
