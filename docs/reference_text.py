"""The written parts of the reference pages, which docs/generate_reference.py adds to facts from the code."""

SETTINGS_INTRO = """\
Every setting is a flag of `skyrl-tx serve`, an environment variable and a key of the YAML file that
`--config` names. Flags have precedence over environment variables, those over the file, and the
file over defaults. Keys of the file are the flags' names with underscores: `data_dir: /data`,
`backend_config: {mesh: {tp: 2}}`. A name that does not exist is an error. Names that end in `_s`
are seconds, in `_bytes` bytes, in `_tokens` tokens. `skyrl-tx api` and `skyrl-tx engine` take the
same flags.

Some settings **change results bitwise**: with another value, losses and samples differ in their
last bits, as they do on another device. Do not change such a setting in the middle of a run that
you want to repeat exactly. These settings are part of the fingerprint that is stored with weights,
and a server that loads weights with another fingerprint warns.

Settings that no longer exist are listed in [Upgrading from 0.2](../guides/upgrading.md#settings).
The backend `fake` is for tests; `skyrl-tx serve --backend fake --help` lists its settings."""

ENDPOINTS_INTRO = """\
All paths are below `/api/v1`, except the paths of the OpenAI and Anthropic APIs. Clients send their
API key, or a token that they got for it, in the header `X-API-Key` or as `Authorization: Bearer`.
The bodies of `forward_backward` and `asample`, and their results, are protobuf or JSON, depending
on `Content-Type` and `Accept`. All other bodies are JSON. The fields of all bodies are in the
OpenAPI document of a running server at `/openapi.json`.

If the engine has to execute a request, for example a `forward_backward`, the server answers
immediately with a future, and `retrieve_future` waits for the result. An endpoint that is not
listed responds with 404."""

CHAT_ENDPOINTS = """\
The OpenAI paths are also served below `/v1`. Errors have the format of the respective API. The
[guide](../guides/openai.md) explains the fields. A field that would change the result and is not
supported is refused by its name."""

PARITY = """\
The table lists every endpoint that a release of the `tinker` SDK from 0.16.1 to 0.38.0 calls, and
how this server answers: immediately, with a future for `retrieve_future`, or when there is
something new (long polling). An endpoint that this server did not have would be marked **404**."""

UNSUPPORTED = """\
Two features of these endpoints are not supported:

- The Dimuon optimizer: `create_model` and `optim_step` fail with a user error
  ([why](../decisions/training.md#optimizers-adamw-only)).
- Images and audio: the training request or sample fails with a user error that names the chunk."""

LOSSES_INTRO = """\
Every loss is a plain sum over positions. The server does not divide by the number of tokens or
sequences. `weights` multiply the loss of each position; for policy-gradient losses they are
optional and default to 1.

Notation: l is the log-probability of the target token under the trained model, q is its
log-probability when it was sampled (`logprobs`), A is the advantage, and r = exp(l − q). Positions
whose advantage or weight is 0 do not count. `stopgrad` passes no gradient."""

LOSS_NUMBERS = """\
A number in the config must be finite and 0 or more, and `clip_low_threshold` must not be greater
than `clip_high_threshold`."""

CUSTOM_LOSSES = """\
`ServiceClient.create_custom_loss` traces a loss function on the client and uploads the graph. The
server then evaluates it in one forward/backward request ([guide](../guides/losses.md)): for each
datum in float32, and the values are summed. The result has `loss:sum` and the metrics that the loss
returns. A loss may use the functions and methods below, arithmetic, comparisons, `&`, `|`, `^` and
`~` of bool tensors, `x[...]` with whole numbers, `None`, `...` and slices such as `x[1:]`, `x[:-1]`
and `x[:4]`, `x.shape` and `x.ndim`. An upload with anything else is refused with the name of the
node."""

LOSS_NOTES = {
    "stable_reinforce": """\
**This is our definition.** Tinker has a loss of this name, but has not published its formula. Our
loss is −Σ stopgrad(min(r, `clip_high_threshold`)) · A · l + `kl_coeff` · Σ ½ (l − q)², summed over
sampled positions.

The client does not send q. The server records it when it samples the tokens
(`record_stability_info` of `asample`), finds it through the provenance spans of the datum, and
keeps it for 24 hours after its last use. Advantages at positions that were not sampled are
refused.""",
}

METRICS = """\
| Request | Metrics |
|---|---|
| `forward`, `forward_backward` | `loss:sum` `num_tokens:sum` `num_datums:sum` |
| of policy-gradient losses also | {policy}, each as `:mean`, `:sum` and `_count:sum` |
| of models with experts (MoE) also | `e_frac_with_tokens:mean` `e_frac_oversubscribed:mean` \
`e_max_violation:mean` `e_max_violation:max` `e_min_violation:mean` |
| of runs that share prefixes also | `num_shared_tokens:sum` |
| `optim_step` | `unclipped_grad_l2:mean` `learning_rate:mean` `step:max` |

The suffix says how the SDK combines the requests into which it cuts a large call. It weighs a
`:mean` by datums, so `:sum` divided by `_count:sum` is the exact mean over positions, however the
call was cut. Where no position counts there is no `:mean`; if one request of a call lacks it, the
SDK omits it for the whole call. NaN and infinity are passed on as such.

`ratio` is r, `kl_to_sampler` is q − l, and `clip_fraction` is the share of positions whose ratio is
outside the thresholds (of `gspo`: the ratio of the sequence). All are taken over positions whose
advantage and weight are not 0.

`num_shared_tokens` counts the tokens that the server did not compute, because another example of
the request begins with them. They are included in `num_tokens`, and usage counts them.

The metrics of experts say how evenly a request used them. In each layer with experts, the server
counts how many tokens of the request each expert received. The perfect balance is the mean of these
counts. `e_frac_with_tokens` is the share of experts with at least one token, and
`e_frac_oversubscribed` is the share of experts above the balance. `e_max_violation` is
(largest count − balance) / balance, and `e_min_violation` is (smallest count − balance) / balance.
`:mean` and `:max` are taken over the layers. All tokens of the examples count, but not padding.
Source: `ForwardBackwardOutput.metrics` in the SDK."""

MODELS_INTRO = """\
The server reads `architectures` in a checkpoint's `config.json`. A key of that file that would
change the computation and is not implemented is refused by its name.

Checkpoints are read as safetensors. Embeddings may be tied or untied. Tensors in FP8 blocks
(DeepSeek-V3), INT4 groups (Kimi K2 Thinking) and MXFP4 (gpt-oss) are unpacked at the start, so a
device holds them as `bfloat16`: 42 GB for gpt-oss-20b. Other forms of quantization are refused by
name. Tensors are `bfloat16` on accelerators and `float32` on CPU unless `--backend-config.dtype`
says otherwise; adapters, gradients and optimizer moments are `float32` always.

The last column says whether training computes the common beginning of a request's examples once
([decision](../decisions/training.md#shared-prefixes-a-common-beginning-is-computed-once)). Meshes
and the attention kernels for GPUs and TPUs compute it for each example, and so do delta nets on
GPUs and TPUs."""

ADAPTERS = """\
## Adapters

LoRA on attention (`train_attn`), on the feed-forward layers with all experts (`train_mlp`, see
`--backend-config.expert-lora`), and on the unembedding (`train_unembed`). Models with different
ranks train and sample at the same time. Alpha is {alpha:g}, so the scale is {alpha:g} / rank.

A family that is missing is one file: [adding a model
family](../internals/adding_a_model_family.md)."""

METRIC_FAMILIES_INTRO = """\
`/metrics` serves these in the text format of Prometheus, or in OpenMetrics. How to scrape and draw
them is in [Monitoring](../guides/monitoring.md). A histogram has the suffixes `_bucket`, `_sum` and
`_count`. What a backend does not tell, such as the memory of a CPU, has no sample."""

RECIPES_INTRO = """\
Recipes of `tinker-cookbook` run against this server without changes. Start the server with a model
that the recipe knows, and set two environment variables:

```bash
skyrl-tx serve --base-model Qwen/Qwen3-8B

pip install 'tinker-cookbook[math-rl]=={cookbook}'
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python -m tinker_cookbook.recipes.math_rl.train model_name=Qwen/Qwen3-8B log_path=logs/math_rl
```

The slow tests (`tests/recipes`) run the recipes of `tinker-cookbook` {cookbook} on this page
unmodified, on a tiny model that is served under the name `Qwen/Qwen3-8B`, with small data sets
instead of the data that the recipes download from the hub. We have not run them with real weights.
Recipes need different extras of the package, for example `math-rl` for `math_rl`; the error of a
recipe names the missing extra."""

RECIPE_NAMES = """\
## Which names must match

**The model.** `model_name` must be a name of the served model. The server accepts its
`--base-model`, its `--served-model-name` and its `--served-model-aliases`, also with an ending such
as `:peft:262144`. The defaults of the recipes are other models, for example `Qwen/Qwen3.5-9B-Base`,
so pass `model_name`.

**The cookbook's table of models.** The cookbook looks up the chat format (renderer) of a model by
its name. `Qwen/Qwen3-8B` is in its table, `Qwen/Qwen3-0.6B` is not. For a model that is missing
there, pass the renderer, for example `renderer_name=qwen3`. `sl_loop`, `rl_loop`, `sl_basic`,
`rl_basic` and the chat program have no such argument and need a name of the table.

**A local directory.** Give it a public name, and let the client find the tokenizer under that name
on the hub:

```bash
skyrl-tx serve --base-model /models/my-qwen3 --served-model-name Qwen/Qwen3-8B
```

**Teachers and judges.** A server has one base model. A teacher, a judge or an opponent must
therefore be the same base model, or a checkpoint of it. Pass its name where the recipe has an
argument (`teacher_model`, `grader_llm_name`), or make the name of the recipe an alias:

```bash
skyrl-tx serve --base-model Qwen/Qwen3-8B \\
    --served-model-aliases Qwen/Qwen3.5-4B,Qwen/Qwen3.5-9B,Qwen/Qwen3.6-35B-A3B
```

| Recipe | Names that it uses in addition to `model_name` |
|---|---|
| `distillation.on_policy_distillation` | `teacher_model`, default `Qwen/Qwen3.5-9B` |
| `distillation.on_policy_multi_teacher` | `deepmath_teacher_model`, `tulu3_teacher_model` |
| `rubric.train` | `grader_llm_name`, default `Qwen/Qwen3.6-35B-A3B` |
| `multiplayer_rl.twenty_questions.train` | the player that answers: `Qwen/Qwen3.5-9B`, without an argument |
| `prompt_distillation.create_data` | `Qwen/Qwen3.6-35B-A3B`, without an argument |
| `true_thinking_score.run_small_experiment` | `Qwen/Qwen3.5-4B`, without an argument |

**The LoRA rank.** The server refuses a LoRA rank above `--backend-config.max-lora-rank`, which is
64 by default. The three recipes of `distillation` and `sdft` have rank 128. Start the server with
`--backend-config.max-lora-rank 128`, or pass `lora_rank=64`."""

TRAINING_RECIPES = """\
## Training recipes

These are the commands that the tests run. The arguments for steps, batches and lengths make a run
short; leave them out to get the defaults of the recipe. `CHECKPOINT` is the path of a training
checkpoint, for example a checkpoint of `chat_sl`. Without `load_checkpoint_path`, training
begins with a new adapter. Files such as `chats.jsonl` are your data."""

OTHER_RECIPES = """\
## Loops, chat and evaluations

The cookbook's shortest programs, supervised and by reinforcement learning. `rl_loop` uses the loss
[`stable_reinforce`](losses.md#stable_reinforce) unless another one is named:

```bash
python -m tinker_cookbook.recipes.sl_loop model_name=Qwen/Qwen3-8B \\
    log_path=logs/sl_loop batch_size=16
python -m tinker_cookbook.recipes.rl_loop model_name=Qwen/Qwen3-8B log_path=logs/rl_loop \\
    batch_size=8 group_size=8 loss_fn=importance_sampling
```

With trackio, `rl_loop` also [logs its rewards](../guides/metrics.md#recipes-of-tinker-cookbook) to
this server.

Supervised training on a file of conversations:

```bash
python -m tinker_cookbook.recipes.chat_sl.train model_name=Qwen/Qwen3-8B log_path=logs/chat_sl \\
    dataset=chats.jsonl batch_size=32 num_epochs=4
```

Three stages of RLHF: supervised training, a reward model from comparisons, and reinforcement
learning on its judgements:

```bash
python -m tinker_cookbook.recipes.preference.rlhf.rlhf_pipeline base_model=Qwen/Qwen3-8B \\
    short_name=tiny batch_size=4
```

Data for prompt distillation, and an experiment that scores the steps of a chain of thought. The
names of their models are fixed, so the server needs aliases (see above):

```bash
python -m tinker_cookbook.recipes.prompt_distillation.create_data output_file=created.jsonl
python -m tinker_cookbook.recipes.true_thinking_score.run_small_experiment
```

Chat with a checkpoint, and evaluate one with inspect-ai. `SAMPLER` is the path of sampler weights,
`tinker://…`:

```bash
python -m tinker_cookbook.chat_app.tinker_chat_cli base_model=Qwen/Qwen3-8B model_path=SAMPLER
python -m tinker_cookbook.eval.run_inspect_evals tasks=task.py@sums model_path=SAMPLER \\
    temperature=0.6 top_p=0.9
```

The tests also run the GSM8K benchmark of the cookbook, its two evaluators of the negative
log-likelihood, and its checkpoint manager."""

NOT_RUN = """\
## Recipes that are not tested

| Recipe | Reason |
|---|---|
| `search_tool`, `code_rl`, `harbor_rl` | they need external services and sandboxes |
| `verifiers_rl`, `text_arena` | they need packages with environments |
| `vlm_classifier`, `audio` | the server refuses images and audio |
| `decisions` | it needs the renderer of one hosted model |
| `forecasting` | it needs a data set that is checked by its hash |

What these recipes send beyond the recipes above is tested through the SDK:
`target_prompt_logprobs`, (N, K) targets, and provenance spans.

## SDK releases

A first run of each of these `tinker` releases is tested: {sdks}."""

PYTHON_API_INTRO = """\
A backend in another package imports only the modules on this page. `skyrl_tx.contract` is the
interface between the engine and a backend, and `skyrl_tx.testing` has the tests that a backend
should pass, for example `skyrl_tx.testing.backend_suite.BackendSuite`. Both packages are public: a
name is removed only after a minor release that warns about it
([promises](https://github.com/skyrl-tx/skyrl_tx/blob/main/CONTRIBUTING.md#stable-interfaces)).

Start with [Adding a backend](../internals/adding_a_backend.md), which explains the order of work
and the rules that are easy to miss. Methods marked *abstract* have to be implemented; all other
methods have a default."""
