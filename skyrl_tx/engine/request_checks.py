"""Check the requests that the backend executes against its capabilities.

All functions are pure. They raise UserError with the field as the SDK names it, the value and the
limit, for example `num_samples 0 must be 1 or more`.
"""

from collections.abc import Collection
from dataclasses import fields, replace

import numpy as np
from msgspec import UnsetType

from skyrl_tx.contract.arrays import NumberArray, max_targets
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.custom_loss import (
    CUSTOM,
    LOGPROBS,
    MAX_ELEMENTS,
    MAX_EXACT,
    CustomLoss,
    CustomLossInput,
    Needs,
)
from skyrl_tx.contract.errors import FieldError, UserError
from skyrl_tx.contract.ids import checkpoint_name
from skyrl_tx.contract.losses import TARGET_TOKENS, LossInput, LossSpec
from skyrl_tx.contract.numbers import MAX_FLOAT32, check_number, check_order
from skyrl_tx.contract.requests import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    CreateModel,
    Datum,
    LoadWeights,
    LoraSpec,
    ModelPass,
    ModelSpec,
    OptimizerParams,
    PromptOptions,
    Sample,
    SamplingControls,
    SamplingParams,
    SaveWeights,
)

_TARGETS_ONLY = LossSpec(name=CUSTOM, inputs={TARGET_TOKENS: LossInput(is_integer=True, max_ndim=2)})
"""The inputs that all custom losses have."""
_MAX_RESULT_LOGPROBS = 2**26
"""Maximum number of log-probabilities in the result of one sample request, which are 512 MiB."""
_CONTROL_NUMBERS = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
"""The fields of `SamplingControls` that are numbers."""


def check_create(request: CreateModel, capabilities: Capabilities, base_models: Collection[str]) -> None:
    """Check `create_model`."""
    _check_base_model(request.base_model, base_models)
    _check_spec(request.spec, capabilities)


def check_load(
    request: LoadWeights, capabilities: Capabilities, base_models: Collection[str], current: ModelSpec | None
) -> None:
    """Check `load_weights`.

    `current` is the spec of the model, or None if the request creates the model.
    """
    if request.base_model is not None:
        _check_base_model(request.base_model, base_models)
    _check_spec(request.spec, capabilities)
    if current is None:
        return
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(request.spec.lora, name), getattr(current.lora, name)
        if theirs != ours:
            raise UserError(
                f"path {request.path!r}: the checkpoint has lora_config.{name} {theirs}, but the model has {ours}; "
                "load it into a new model"
            )


def check_save(request: SaveWeights) -> None:
    """Check `save_weights`."""
    if request.name is not None:
        checkpoint_name(request.name)
    elif request.kind != "sampler_weights" or request.sampling_session_id is None:
        raise UserError("path is missing: name the checkpoint")
    if request.ttl_s is not None and request.ttl_s <= 0:
        raise UserError(f"ttl_seconds {request.ttl_s} must be positive")


def check_optim(params: OptimizerParams) -> None:
    """Check `optim_step`."""
    for field in fields(params):
        check_number(f"adam_params.{field.name}", getattr(params, field.name))

    # The factors of a step must be finite in float32, or it would leave weights that are not.
    rate = params.learning_rate
    factors = {
        f"weight_decay {params.weight_decay}: their product": rate * params.weight_decay,
        f"beta1 {params.beta1}: learning_rate / (1 - beta1)": rate / (1 - params.beta1),
    }
    for what, factor in factors.items():
        if factor > MAX_FLOAT32:
            raise UserError(f"adam_params.learning_rate {rate} and {what} exceeds float32; lower learning_rate")


def check_pass(request: ModelPass, capabilities: Capabilities) -> None:
    """Check `forward` or `forward_backward`."""
    if not request.data:
        raise UserError("data is empty")
    if not isinstance(request.custom, UnsetType):
        _check_custom_pass(request, request.custom, capabilities)
        return
    spec = capabilities.losses.get(request.loss)
    if spec is None:
        raise UserError(f"loss_fn {request.loss!r} is not one of {_join_names(capabilities.losses)}")

    # The config.
    config = dict(spec.config)
    for name, value in request.loss_config.items():
        if name not in spec.config:
            raise UserError(f"loss_fn_config.{name}: {spec.name} takes {_join_names(spec.config)}")
        if isinstance(value, str):
            raise UserError(f"loss_fn_config.{name} {value[:100]!r} must be a finite number (float32)")
        check_number(f"loss_fn_config.{name}", value)
        config[name] = value
    check_order("loss_fn_config.", config)

    for index, datum in enumerate(request.data):
        _check_datum(f"data[{index}]", datum, spec, capabilities)


def check_sample(request: Sample, capabilities: Capabilities) -> None:
    """Check `sample`."""
    _check_tokens("prompt", request.prompt, capabilities.vocab_size)
    check_number("num_samples", request.num_samples)
    check_params(request.params, capabilities)

    # The number of tokens. `max_tokens` null means the rest of the context.
    length, limit = request.prompt.size, capabilities.max_context_length
    max_tokens = request.params.max_tokens
    if max_tokens is None:
        if length >= limit:
            raise UserError(
                f"prompt has {length} tokens: no new token fits into the context of {limit} tokens; shorten the prompt "
                "(sampling_params.max_tokens is null, which means the rest of the context)"
            )
        max_tokens = limit - length

    # They must fit into the context and the KV cache.
    check_number("sampling_params.max_tokens", max_tokens)
    num_tokens, capacity = length + max_tokens, capabilities.max_sample_tokens
    if num_tokens > min(limit, capacity):
        exceeded = f"the context of {limit} tokens" if num_tokens > limit else f"the KV cache of {capacity} tokens"
        raise UserError(f"prompt of {length} tokens + sampling_params.max_tokens {max_tokens} exceeds {exceeded}")
    _check_options(request.options, length, capabilities)

    # The size of the result.
    num_logprobs = request.num_samples * max_tokens * (1 + request.options.sample_topk)
    if num_logprobs > _MAX_RESULT_LOGPROBS:
        raise UserError(
            f"num_samples {request.num_samples} x max_tokens {max_tokens} x (1 + topk_sample_logprobs "
            f"{request.options.sample_topk}) is {num_logprobs} log-probabilities: must be at most "
            f"{_MAX_RESULT_LOGPROBS}; send multiple requests"
        )


def _check_custom_pass(request: ModelPass, loss: CustomLoss, capabilities: Capabilities) -> None:
    if not capabilities.offers_custom_losses:
        raise UserError(f"loss_fn {request.loss!r} is not one of {_join_names(capabilities.losses)}")
    needs = loss.needs()
    for index, datum in enumerate(request.data):
        targets = {name: array for name, array in datum.loss_inputs.items() if name == TARGET_TOKENS}
        with_targets = replace(datum, loss_inputs=targets)
        _check_datum(f"data[{index}]", with_targets, _TARGETS_ONLY, capabilities)
        _check_custom_inputs(f"data[{index}]", datum, loss, needs)


def _check_custom_inputs(field: str, datum: Datum, loss: CustomLoss, needs: Needs) -> None:
    """Check the inputs of a datum except its targets, and that its size fits the loss."""
    length = datum.tokens.size

    # Each input is present.
    shapes = {LOGPROBS: datum.loss_inputs[TARGET_TOKENS].shape}
    for declared in loss.inputs:
        if declared.name == LOGPROBS:
            continue
        array = datum.loss_inputs.get(declared.name)
        if array is None:
            raise UserError(f"{field}.loss_fn_inputs[{declared.name!r}] is missing: loss {loss.name!r} reads it")
        shapes[declared.name] = _check_custom_input(
            f"{field}.loss_fn_inputs[{declared.name!r}]", array, declared, length
        )

    # Each input has its declared rank, and all have the same number of targets per position.
    width: int | None = None
    for declared in loss.inputs:
        shape = shapes[declared.name]
        if len(shape) != declared.rank:
            raise UserError(
                f"{field}: loss {loss.name!r} declares {declared.name!r} with {declared.rank} dimensions; it has "
                f"{len(shape)}"
            )
        if declared.rank == 2:
            if width is not None and shape[1] != width:
                raise UserError(
                    f"{field}: inputs of loss {loss.name!r} have {width} and {shape[1]} targets per position"
                )
            width = shape[1]

    # The datum is large enough for the loss, and not too large to compute it.
    if length < needs.positions:
        raise UserError(f"{field} has {length} tokens; loss {loss.name!r} needs at least {needs.positions}")
    if (width or 1) < needs.targets:
        raise UserError(f"{field} has {width} targets per position; loss {loss.name!r} needs at least {needs.targets}")
    if (count := needs.num_elements(length, width or 1)) > MAX_ELEMENTS:
        raise UserError(
            f"{field}: loss {loss.name!r} would compute {count} numbers for its {length} tokens; must be at most "
            f"{MAX_ELEMENTS}"
        )


def _check_custom_input(field: str, array: NumberArray, expected: CustomLossInput, length: int) -> tuple[int, ...]:
    """Check the numbers of an input and return its shape.

    A scalar may have the shape [1], because protobuf cannot represent an empty shape.
    """
    if expected.rank == 0 and array.size == 1:
        shape: tuple[int, ...] = ()
    else:
        shape = array.shape
        if not shape or shape[0] != length or array.size == 0:
            raise UserError(f"{field} has shape {list(shape)}; model_input has {length} tokens")
    if array.dtype.kind in "iu" and ((array > MAX_EXACT) | (array < -MAX_EXACT)).any():
        raise UserError(f"{field} contains an integer above {MAX_EXACT}, which float32 does not hold exactly")
    if not np.isfinite(array).all():
        raise UserError(f"{field} contains {array[~np.isfinite(array)][0]}; numbers must be finite")
    return shape


def _check_base_model(name: str, base_models: Collection[str]) -> None:
    if name not in base_models:
        raise UserError(f"base_model {name[:200]!r} is not served here; this server has {_join_names(base_models)}")


def _check_spec(spec: ModelSpec, capabilities: Capabilities) -> None:
    if spec.optimizer not in capabilities.optimizers:
        raise UserError(f"optimizer {spec.optimizer!r} is not one of {_join_names(capabilities.optimizers)}")
    lora: LoraSpec = spec.lora
    check_number("lora_config.rank", lora.rank, high=capabilities.max_lora_rank)
    targets = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    if not any(targets.values()):
        raise UserError("lora_config: train_attn, train_mlp and train_unembed are all false: nothing to train")
    if refused := [
        f"train_{name}" for name, is_on in targets.items() if is_on and name not in capabilities.lora_targets
    ]:
        raise UserError(
            f"lora_config.{', '.join(refused)} True: this server cannot train these layers; "
            f"create the client with {', '.join(f'{name}=False' for name in refused)}"
        )


def _check_tokens(field: str, tokens: NumberArray, vocab_size: int) -> None:
    if tokens.size == 0:
        raise UserError(f"{field} has no tokens")
    _check_vocabulary(field, tokens, vocab_size)


def _check_vocabulary(field: str, tokens: NumberArray, vocab_size: int, lowest: int = 0) -> None:
    outside = (tokens < lowest) | (tokens >= vocab_size)
    if outside.any():
        raise UserError(f"{field}: token {int(tokens[outside][0])} is outside the vocabulary of {vocab_size} tokens")


def _check_datum(field: str, datum: Datum, spec: LossSpec, capabilities: Capabilities) -> None:
    # The tokens.
    _check_tokens(f"{field}.model_input", datum.tokens, capabilities.vocab_size)
    length = datum.tokens.size
    context, limit = capabilities.max_context_length, capabilities.max_training_length
    if limit is None and length > context:
        raise UserError(f"{field}.model_input has {length} tokens; the context is {context}")
    if limit is not None and length > limit:
        raise UserError(f"{field}.model_input has {length} tokens; an example in training has at most {limit}")

    # The loss inputs.
    for name in datum.loss_inputs:
        if name not in spec.inputs:
            raise UserError(f"{field}.loss_fn_inputs[{name!r}]: {spec.name} takes {_join_names(spec.inputs)}")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, expected in spec.inputs.items():
        array = datum.loss_inputs.get(name)
        if array is not None:
            _check_input(f"{field}.loss_fn_inputs[{name!r}]", array, expected, length, capabilities)
            shapes[name] = array.shape
        elif expected.fill is None:
            raise UserError(f"{field}.loss_fn_inputs[{name!r}] is missing: {spec.name} needs it")

    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise UserError(f"{field}.loss_fn_inputs disagree in shape: {listed}")


def _check_input(field: str, array: NumberArray, expected: LossInput, length: int, capabilities: Capabilities) -> None:
    if not 1 <= array.ndim <= expected.max_ndim or array.size == 0:
        raise UserError(f"{field} has shape {list(array.shape)}; expected [{length}]")
    if array.shape[0] != length:
        raise UserError(f"{field} has length {array.shape[0]}, model_input has {length} tokens")
    _check_width(field, array, capabilities.vocab_size)
    if expected.is_integer:
        if array.dtype.kind not in "iu":
            raise UserError(f"{field} has dtype {array.dtype.name}; expected integers (int64)")
        _check_vocabulary(field, array, capabilities.vocab_size)
    elif not np.isfinite(array).all():
        raise UserError(f"{field} contains {array[~np.isfinite(array)][0]}; numbers must be finite")


def _check_width(field: str, array: NumberArray, vocab_size: int) -> None:
    """Check the number K of targets per position. The array has shape [T] or [T, K]."""
    if array.ndim == 1:
        return
    width = array.shape[1]
    if width > (limit := max_targets(array.shape[0])):
        raise UserError(f"{field} has shape {list(array.shape)}: a position may have at most {limit} targets")
    if width > vocab_size:
        raise UserError(
            f"{field} has shape {list(array.shape)}: a position may have at most {vocab_size} targets, "
            "the size of the vocabulary"
        )


def check_params(params: SamplingParams, capabilities: Capabilities) -> None:
    """Check everything about `params` except `max_tokens`."""
    vocab_size = capabilities.vocab_size
    if params.controls:
        _check_controls(params, params.controls, capabilities)

    # Distribution.
    for name in ("temperature", "top_p", "top_k"):
        check_number(f"sampling_params.{name}", getattr(params, name))

    # Log-probabilities. Both kinds are equal unless the distribution changes.
    kind = params.logprobs_kind
    if (params.temperature not in (0, 1) or params.controls) and kind not in capabilities.sampled_logprobs:
        offered = " and ".join(sorted(capabilities.sampled_logprobs)) or "no"
        raise UserError(
            f"sampled_logprobs {kind!r} is not offered at temperature {params.temperature}: this server's samples have "
            f"{offered} log-probabilities; see --sampled-logprobs and the session metadata skyrl_tx.sampled_logprobs"
        )

    # Stop strings and tokens.
    if (count := len(params.stop_strings)) > MAX_STOP_STRINGS:
        raise UserError(f"sampling_params.stop has {count} strings: must have at most {MAX_STOP_STRINGS}")
    if (count := len(params.stop_token_ids)) > MAX_STOP_TOKENS:
        raise UserError(f"sampling_params.stop has {count} tokens: must have at most {MAX_STOP_TOKENS}")
    if (longest := max(map(len, params.stop_strings), default=0)) > MAX_STOP_CHARS:
        raise UserError(
            f"sampling_params.stop contains a string of {longest} characters: must have at most {MAX_STOP_CHARS}"
        )
    if "" in params.stop_strings:
        raise UserError("sampling_params.stop contains an empty string")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"sampling_params.stop: token {token} is outside the vocabulary of {vocab_size} tokens")


def _check_controls(params: SamplingParams, controls: SamplingControls, capabilities: Capabilities) -> None:
    for name in controls.list_used():
        if name not in capabilities.sampling_controls:
            raise FieldError(f"{name} is not supported by the backend of this server", name)

    # Numbers.
    for name in _CONTROL_NUMBERS:
        check_number(name, getattr(controls, name))
    if params.max_tokens is not None and controls.min_tokens > params.max_tokens:
        raise FieldError(
            f"min_tokens {controls.min_tokens} must not be greater than max_tokens {params.max_tokens}", "min_tokens"
        )

    # Bias.
    if (count := len(controls.logit_bias)) > MAX_LOGIT_BIAS:
        raise FieldError(f"logit_bias has {count} entries: must have at most {MAX_LOGIT_BIAS}", "logit_bias")
    for token, bias in controls.logit_bias:
        if not 0 <= token < capabilities.vocab_size:
            raise FieldError(
                f"logit_bias: token {token} is outside the vocabulary of {capabilities.vocab_size} tokens", "logit_bias"
            )
        check_number(f"logit_bias[{token}]", bias, field="logit_bias")


def _check_options(options: PromptOptions, length: int, capabilities: Capabilities) -> None:
    most = capabilities.max_topk_logprobs
    check_number("topk_prompt_logprobs", options.topk, field="topk_logprobs", high=most)
    check_number("topk_sample_logprobs", options.sample_topk, field="topk_logprobs", high=most)
    check_number("prompt_alt_tokens_k", options.alt_tokens_k, high=capabilities.max_alt_tokens)
    if options.last_n is not None:
        check_number("prompt_logprobs_last_n", options.last_n, high=length - 1)

    targets = options.target_tokens
    if targets is not None:
        if not capabilities.offers_target_logprobs:
            raise UserError("target_prompt_logprobs is not offered by this server")
        if targets.ndim != 2 or targets.shape[0] != length - 1:
            raise UserError(f"target_prompt_logprobs has shape {list(targets.shape)}; expected [{length - 1}, K]")
        _check_width("target_prompt_logprobs", targets, capabilities.vocab_size)
        _check_vocabulary("target_prompt_logprobs", targets, capabilities.vocab_size, lowest=-1)


def _join_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
