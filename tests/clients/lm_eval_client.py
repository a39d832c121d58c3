"""Log-likelihoods and text by `lm-eval`'s `local-completions`: `python lm_eval_client.py URL MODEL TOKENIZER`.

Reads pairs of context and continuation as JSON from standard input; prints their log-likelihoods and one generation.
"""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

URL, MODEL, TOKENIZER = sys.argv[1:]


def main() -> None:
    pairs = json.load(sys.stdin)
    model = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions",
        model=MODEL,
        tokenizer=TOKENIZER,
        tokenizer_backend="huggingface",
        max_length=120,
    )

    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=index)
        for index, pair in enumerate(pairs)
    ]
    scored = model.loglikelihood(asked, disable_tqdm=True)

    generated = model.generate_until(
        [
            Instance(
                request_type="generate_until",
                doc={},
                arguments=("Natalia", {"until": ["\n"], "max_gen_toks": 20}),
                idx=0,
            )
        ],
        disable_tqdm=True,
    )

    chat = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model=MODEL, eos_string="<|im_end|>")
    talk = JsonChatStr(json.dumps([{"role": "user", "content": "How many clips?"}]))
    replied = chat.generate_until(
        [
            Instance(
                request_type="generate_until", doc={}, arguments=(talk, {"until": ["##"], "max_gen_toks": 20}), idx=0
            )
        ],
        disable_tqdm=True,
    )

    tokens = [model.tok_encode(context + continuation) for context, continuation in pairs]
    contexts = [model.tok_encode(context) for context, _ in pairs]
    print(
        json.dumps({"scored": scored, "generated": generated, "tokens": tokens, "contexts": contexts, "chat": replied})
    )


main()
