"""Reinforcement learning with your own reward function. Change MODEL, LEARNING_RATE, QUESTIONS and reward()."""

import tinker
from tinker import types

MODEL, LEARNING_RATE = "tiny", 1e-2  # for Qwen/Qwen3-0.6B: about 4e-5
STEPS, GROUP_SIZE, MAX_TOKENS = 15, 32, 8
QUESTIONS = {"What is 2 + 3?": "5", "What is 4 + 4?": "8", "What is 9 - 6?": "3", "What is 7 - 6?": "1"}


def reward(answer: str, expected: str) -> float:
    """Return 1 for the right answer, otherwise half the fraction of its characters that are digits."""
    digits = sum(character.isdigit() for character in answer)
    return 1.0 if answer.strip() == expected else 0.5 * digits / max(len(answer), 1)


def make_datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """Return one sample as a training example. Only sampled tokens have an advantage; prompt tokens have 0."""
    tokens, zeros = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [*zeros, *sample.logprobs],
        "advantages": [*zeros, *[advantage] * len(sample.tokens)],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


service = tinker.ServiceClient()  # the server of TINKER_BASE_URL
training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
tokenizer = training.get_tokenizer()
prompts = []
for question in QUESTIONS:
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompts.append(tokenizer.encode(text, add_special_tokens=False))

for step in range(STEPS):
    # Sample a group of answers to each question with the newest weights.
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=MAX_TOKENS, seed=step)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP_SIZE, params) for prompt in prompts]

    # Score the answers. The advantage of an answer is its reward minus the mean reward of its group.
    data, rewards = [], []
    for prompt, expected, future in zip(prompts, QUESTIONS.values(), futures, strict=True):
        samples = future.result().sequences
        scores = [reward(tokenizer.decode(sample.tokens, skip_special_tokens=True), expected) for sample in samples]
        mean = sum(scores) / len(scores)
        data += [make_datum(prompt, sample, score - mean) for sample, score in zip(samples, scores, strict=True)]
        rewards += scores

    # Train on all answers. Both requests are sent before the program waits for a result.
    gradient = training.forward_backward(data, "importance_sampling")
    update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    gradient.result()
    update.result()
    print(f"step {step + 1}/{STEPS}  reward {sum(rewards) / len(rewards):.3f}", flush=True)

print("to sample from:", training.save_weights_for_sampler("final").result().path)
