"""Reinforcement learning on GSM8K with importance_sampling. An answer's advantage is relative to the group's mean."""

import common
import numpy as np
from tinker import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

parser = common.flags(__doc__)
parser.add_argument("--checkpoint", help="tinker:// path of a training checkpoint to start from, as sft.py prints it")
parser.add_argument("--rank", type=int, default=32, help="rank of a new adapter")
parser.add_argument("--groups", type=int, default=128, help="questions per step")
parser.add_argument("--group-size", type=int, default=16, help="answers per question")
parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
parser.add_argument("--max-tokens", type=int, default=256, help="maximum length of an answer, in tokens")
parser.add_argument("--learning-rate", type=float, default=4e-5, help="constant learning rate")
parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")


def reward(answer: str, reference: str) -> float:
    """Return 1 for the right number, 0.1 for any other number in the requested format, and 0 otherwise."""
    given = common.number(answer)
    return 0.0 if given is None else 1.0 if given == common.number(reference) else 0.1


def attempt(start: list[int], sequence: SampledSequence, advantage: float) -> Datum:
    """Return a sampled answer as a training example with its logprobs. Prompt tokens have advantage 0."""
    tokens = start + list(sequence.tokens)
    before = np.zeros(len(start) - 1, np.float32)
    logprobs = np.array(sequence.logprobs, np.float32)
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.concatenate([before, logprobs]),
        "advantages": np.concatenate([before, np.full_like(logprobs, advantage)]),
    }
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    args = parser.parse_args()
    tokenizer, questions = common.load_tokenizer(args), common.questions(args.data).train
    with common.connect(args) as service:
        # Continue a checkpoint, or create a new adapter.
        if args.checkpoint:
            training = service.create_training_client_from_state(args.checkpoint).result()
        else:
            training = service.create_lora_training_client(args.model, rank=args.rank, seed=args.seed).result()

        for step in range(args.steps):
            # Sample a group of answers to each question with the current weights.
            sampler = training.save_weights_and_get_sampling_client().result()
            asked = common.batch(questions, step, args.groups)
            starts = [common.prompt(tokenizer, question) for question in asked]
            params = SamplingParams(max_tokens=args.max_tokens, seed=args.seed + step)
            futures = [sampler.sample(ModelInput.from_ints(start), args.group_size, params) for start in starts]

            # Compute rewards and advantages.
            data, rewards = [], []
            for question, start, future in zip(asked, starts, futures, strict=True):
                group = future.result().sequences
                texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in group]
                scores = [reward(text, question.answer) for text in texts]
                rewards += scores
                if len(set(scores)) > 1:  # equal rewards give zero advantages
                    advantages = np.array(scores) - np.mean(scores)
                    data += [attempt(start, *pair) for pair in zip(group, advantages, strict=True)]

            # Train on the answers.
            if data:
                passed = training.forward_backward(data, "importance_sampling")
                training.optim_step(AdamParams(learning_rate=args.learning_rate)).result()
                passed.result()
            print(f"step {step + 1}/{args.steps}  reward {np.mean(rewards):.3f}  trained on {len(data)}", flush=True)

            # Save checkpoints now and then, and at the end.
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                name = "final" if step + 1 == args.steps else f"step-{step + 1}"
                state, weights = training.save_state(name), training.save_weights_for_sampler(name)
                print(f"to train on:    {state.result().path}\nto sample from: {weights.result().path}", flush=True)


if __name__ == "__main__":
    main()
