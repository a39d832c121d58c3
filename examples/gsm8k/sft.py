"""Supervised fine-tuning of a LoRA adapter on the worked answers of GSM8K, with cross_entropy."""

from typing import Any

import common
import numpy as np
from common import Question
from tinker import AdamParams, Datum, ModelInput

parser = common.flags(__doc__)
parser.add_argument("--rank", type=int, default=32, help="rank of the adapter")
parser.add_argument("--batch-size", type=int, default=128, help="questions per step")
parser.add_argument("--steps", type=int, help="optimizer steps; default: one epoch")
parser.add_argument("--learning-rate", type=float, default=1e-4, help="initial learning rate; decays linearly to zero")
parser.add_argument("--name", default="final", help="name of both checkpoints")


def make_datum(tokenizer: Any, question: Question) -> Datum:
    """Return a prompt and its answer as a training example. Only the answer and its end token have weight 1."""
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
            # Send the pass and the optimizer step before waiting for a result, so that the server is never idle.
            data = [make_datum(tokenizer, question) for question in common.batch(questions, step, args.batch_size)]
            rate = args.learning_rate * (1 - step / steps)
            passed = training.forward_backward(data, "cross_entropy")
            update = training.optim_step(AdamParams(learning_rate=rate))

            # Print the mean loss per answer token.
            total = sum(float(row.loss_fn_inputs["weights"].to_numpy().sum()) for row in data)
            loss = passed.result().metrics["loss:sum"] / total
            update.result()
            print(f"step {step + 1}/{steps}  loss {loss:.3f} nats per answer token", flush=True)

        # Save a checkpoint to train on and a checkpoint to sample from.
        state, weights = training.save_state(args.name), training.save_weights_for_sampler(args.name)
        print(f"to train on:    {state.result().path}")
        print(f"to sample from: {weights.result().path}")


if __name__ == "__main__":
    main()
