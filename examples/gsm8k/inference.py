"""Sample answers to the GSM8K test questions, concurrently, from a base model or a checkpoint; write JSON lines."""

import json
from pathlib import Path

import common
from tinker import ModelInput, SamplingParams

parser = common.flags(__doc__)
parser.add_argument("--checkpoint", help="tinker:// path of sampler weights, as sft.py and rl.py print it")
parser.add_argument("--output", type=Path, default=Path("answers.jsonl"), help="file to write, for evaluate.py")
parser.add_argument("--limit", type=int, help="number of questions to answer; default: all")
parser.add_argument("--max-tokens", type=int, default=512, help="maximum length of an answer, in tokens")
parser.add_argument("--temperature", type=float, default=0.5, help="sampling temperature; 0 is greedy")


def main() -> None:
    args = parser.parse_args()
    tokenizer = common.load_tokenizer(args)
    questions = common.questions(args.data).held_out[: args.limit]
    with common.connect(args) as service:
        # Send all requests, then write the answers in order.
        sampler = service.create_sampling_client(base_model=args.model, model_path=args.checkpoint).result()
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        futures = [
            sampler.sample(ModelInput.from_ints(common.prompt(tokenizer, question)), 1, params)
            for question in questions
        ]

        with args.output.open("w") as file:
            for question, future in zip(questions, futures, strict=True):
                answer = tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)
                row = {"question": question.text, "answer": answer, "reference": question.answer}
                file.write(json.dumps(row) + "\n")
    print(f"{len(questions)} answers in {args.output}")


if __name__ == "__main__":
    main()
