"""Teach the worked answers of GSM8K: supervised fine-tuning of a LoRA adapter with cross_entropy."""

from typing import Any

import common
import numpy as np
from common import Question
from tinker import AdamParams, Datum, ModelInput

parser = common.flags(__doc__)
parser.add_argument("--rank", type=int, default=32, help="rank of the adapter")
parser.add_argument("--batch-size", type=int, default=128, help="questions of a step")
parser.add_argument("--steps", type=int, help="steps; without it, one round over the questions")
parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the first step; it falls to zero")
parser.add_argument("--name", default="final", help="name of both checkpoints")


def lesson(tokenizer: Any, question: Question) -> Datum:
    """Return prompt and answer; the loss counts the answer and the token that ends it."""
    start = common.prompt(tokenizer, question)
    answer = [*tokenizer.encode(question.answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = start + answer
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(start) - 1 :] = 1.0
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )


def main() -> None:
    args = parser.parse_args()
    tokenizer, questions = common.load_tokenizer(args), common.questions(args.data).train
    steps = args.steps or -(-len(questions) // args.batch_size)
    with common.connect(args) as service:
        training = service.create_lora_training_client(args.model, rank=args.rank, seed=args.seed).result()
        for step in range(steps):
            data = [lesson(tokenizer, question) for question in common.batch(questions, step, args.batch_size)]
            rate = args.learning_rate * (1 - step / steps)
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=rate))  # sent before the pass is waited for
            total = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)
            loss = passed.result().metrics["loss:sum"] / total
            stepped.result()
            print(f"step {step + 1}/{steps}  loss {loss:.3f} nats per answer token", flush=True)
        state, weights = training.save_state(args.name), training.save_weights_for_sampler(args.name)
        print(f"to train on:    {state.result().path}")
        print(f"to sample from: {weights.result().path}")


if __name__ == "__main__":
    main()
