"""Making models, training passes, optimizer steps."""

from collections.abc import Iterable
from dataclasses import replace

from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.schemas.training import AdamParams, CreateModelRequest, OptimizerConfig, OptimStepRequest, PassInput
from skyrl_tx.api.settings import ApiSettings
from skyrl_tx.api.tensors import DenseBudget
from skyrl_tx.api.translate import provenance
from skyrl_tx.api.translate.checks import finite, require, seed
from skyrl_tx.api.translate.inputs import datum_from_json, datum_from_proto, refuse_unknown
from skyrl_tx.api.translate.translated import Translated
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import LossConfigValue, OptimizerParams

_ADAM = tuple(AdamParams.model_fields)


def create_model(request: CreateModelRequest, settings: ApiSettings) -> Translated:
    """A fresh adapter; its seed is drawn when the client gave none."""
    base_model = settings.known_model_name(request.base_model)
    lora = request.lora_config
    if lora is None:
        raise UserError("lora_config: missing; this server trains LoRA adapters only")
    require(lora.rank >= 1, f"lora_config.rank {lora.rank}: must be at least 1")
    require(
        lora.train_attn or lora.train_mlp or lora.train_unembed,
        "lora_config: at least one of train_attn, train_mlp and train_unembed must be true",
    )
    drawn = requests.CreateModel(
        base_model=base_model,
        spec=requests.ModelSpec(
            lora=requests.LoraSpec(
                rank=lora.rank,
                seed=seed(lora.seed, "lora_config.seed"),
                train_attn=lora.train_attn,
                train_mlp=lora.train_mlp,
                train_unembed=lora.train_unembed,
            ),
            optimizer=optimizer_kind(request.optimizer_config),
        ),
    )
    if lora.seed is not None:
        return Translated.exactly(drawn)
    return Translated(drawn, replace(drawn, spec=replace(drawn.spec, lora=replace(drawn.spec.lora, seed=0))))


def optimizer_kind(config: OptimizerConfig | None) -> str:
    """Return the optimizer's name; AdamW is the only one."""
    kind = "adamw" if config is None else config.type
    require(kind == "adamw", f"optimizer_config.type {shown(kind)}: this server offers 'adamw' only")
    return kind


def optim_step(request: OptimStepRequest) -> Translated:
    """One AdamW step; fields that the client does not send have the SDK's defaults."""
    if request.optimizer_params is not None:
        kind = request.optimizer_params.get("type")
        raise UserError(f"optimizer_params.type {shown(kind)}: this server offers 'adamw', through adam_params")
    adam = request.adam_params
    if adam is None:
        raise UserError("adam_params: missing")
    given = {
        name: _number(getattr(adam, name), f"adam_params.{name}") for name in _ADAM if name in adam.model_fields_set
    }
    params = OptimizerParams(**given)
    for name, value in (("beta1", params.beta1), ("beta2", params.beta2)):
        require(0 <= value < 1, f"adam_params.{name} {value}: must be in [0, 1)")
    for name, value in (("eps", params.eps), ("grad_clip_norm", params.grad_clip_norm)):
        require(value >= 0, f"adam_params.{name} {value}: must not be negative")
    return Translated.exactly(requests.OptimStep(params=params))


def _number(value: float | None, where: str) -> float:
    """Return a finite number. The SDK writes NaN and infinity as null: taken for absent, they would be the default."""
    if value is None:
        raise UserError(f"{where} null: must be a finite number (NaN and infinity arrive as null)")
    return finite(value, where)


def pass_from_proto(message: wire_pb2.ForwardBackwardRequest, max_dense_bytes: int) -> Translated:
    """A training pass as SDKs from 0.25 on send it."""
    budget = DenseBudget(max_dense_bytes)
    config: dict[str, LossConfigValue] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        refuse_unknown(value, f"loss_fn_config[{shown(name)}]")
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = (datum_from_proto(datum, budget, f"data[{index}]") for index, datum in enumerate(message.data))
    made = _model_pass(data, message.loss_fn, config, backward=not message.forward_only)
    if message.loss_fn != provenance.NEEDS_PROVENANCE:
        return made
    return replace(made, provenance=tuple(map(provenance.from_proto, message.data)))


def pass_from_json(request: PassInput, max_dense_bytes: int, *, backward: bool) -> Translated:
    """A training pass as SDKs up to 0.24 send it."""
    budget = DenseBudget(max_dense_bytes)
    data = (datum_from_json(datum, budget, f"data[{index}]") for index, datum in enumerate(request.data))
    made = _model_pass(data, request.loss_fn, request.loss_fn_config or {}, backward=backward)
    if request.loss_fn != provenance.NEEDS_PROVENANCE:
        return made
    return replace(made, provenance=tuple(map(provenance.from_json, request.data)))


def _model_pass(
    data: Iterable[requests.Datum], loss: str, config: dict[str, LossConfigValue], *, backward: bool
) -> Translated:
    for name, value in config.items():
        if not isinstance(value, str):
            finite(value, f"loss_fn_config[{shown(name)}]")
    request = requests.ModelPass(
        data=tuple(data), loss=loss, loss_config=dict(sorted(config.items())), backward=backward
    )
    require(len(request.data) > 0, "data: holds no datum")
    return Translated.exactly(request)
