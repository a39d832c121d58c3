"""A backend on torch: one transformers model with its adapters on one device. It computes one sequence at a time."""

import copy
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from pydantic import BaseModel
from typing_extensions import override

from skyrl_tx.contract import loss_reference
from skyrl_tx.contract.backend import AbstractBackend, Pass, Snapshot, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, CapacityError, UserError
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId
from skyrl_tx.contract.losses import LOSS_SPECS, TARGET_TOKENS
from skyrl_tx.contract.passes import ScratchPass
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.contract.results import Metrics, PassResult, SampleDelta
from skyrl_tx.contract.samples import OpenSamples
from skyrl_tx.contract.state_files import hash_of_base_model
from skyrl_tx_torch import sampling
from skyrl_tx_torch.config import TorchConfig
from skyrl_tx_torch.model import Model, Target, find_directory
from skyrl_tx_torch.state import State, TorchSnapshot, Tree


class TorchBackend(AbstractBackend):
    """A backend on torch for one device. It computes one example at a time, without padding."""

    def __init__(self, base_model: str, config: BaseModel) -> None:
        assert isinstance(config, TorchConfig)
        self._base_model = base_model
        self._config = config
        self._models: dict[ModelId, State] = {}
        self._samplers: dict[SamplerId, State] = {}
        self._prompts: dict[RequestId, tuple[torch.Tensor, Any]] = {}
        self._open = OpenSamples(())

    @override
    def start(self) -> Capabilities:
        # Load the model.
        config = self._config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.set_float32_matmul_precision("highest")
        self._directory = find_directory(self._base_model)
        try:
            self._model = model = Model(self._directory, config)
        except (OSError, ValueError) as error:
            raise UserError(f"base_model {self._base_model!r}: {error}") from error

        # Prepare sampling.
        eos = read_eos_token_ids(self._directory)
        self._open = OpenSamples(eos)
        max_length = min(config.max_context_length, model.max_length)
        name = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"

        return Capabilities(
            # The model.
            max_context_length=max_length,
            vocab_size=model.vocab_size,
            eos_token_ids=eos,
            num_parameters=model.num_parameters,
            devices=(f"{name} (torch)",),
            # What this backend supports.
            max_models=config.max_models,
            max_samplers=config.max_samplers,
            max_sample_tokens=config.sample_slots * max_length,
            max_pass_tokens=8 * config.micro_batch_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            sample_slots=config.sample_slots,
            max_lora_rank=config.max_lora_rank,
            lora_targets=frozenset(target.group for target in model.targets),
            losses=LOSS_SPECS,
            max_topk_logprobs=min(config.max_topk_logprobs, model.vocab_size),
            max_alt_tokens=min(config.max_topk_logprobs, model.vocab_size),
            offers_target_logprobs=True,
            fingerprint={
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "device": name,
                "dtype": str(model.dtype),
                "threads": str(torch.get_num_threads()),
            },
            base_model_hash=hash_of_base_model(self._directory),
        )

    @override
    def close(self) -> None:
        self._models, self._samplers, self._prompts, self._open = {}, {}, {}, OpenSamples(())

    @override
    def check_devices(self) -> None:
        # After a CUDA error no operation succeeds until the process is restarted, so a small one shows the problem.
        try:
            torch.ones(1, device=self._model.device).add(1).item()
        except RuntimeError as error:
            raise BackendLost(str(error)) from error

    # Training

    @override
    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        self._put(model_id, self._fresh(spec.lora))

    @override
    def delete_model(self, model_id: ModelId) -> None:
        self._models.pop(model_id, None)

    @override
    def begin_pass(self, batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
        return TorchPass(batch, self._config, self._model, self._models, backward=backward)

    @override
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        with capacity_errors("an optimizer step"):
            self._models[model_id], norm = self._models[model_id].take_step(params)
        return {
            "unclipped_grad_l2:mean": norm,
            "learning_rate:mean": params.learning_rate,
            "step:max": float(self._models[model_id].step),
        }

    @override
    def gradient_norm(self, model_id: ModelId) -> float:
        gradient = self._models[model_id].gradient
        return 0.0 if gradient is None else gradient.norm()

    @override
    def clear_gradient(self, model_id: ModelId) -> None:
        self._models[model_id] = replace(self._models[model_id], gradient=None)

    # State

    @override
    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        return TorchSnapshot(base_model=self._base_model, state=self._models[model_id], parts=frozenset(parts))

    @override
    def open_snapshot(self, directory: Path) -> Snapshot:
        with capacity_errors("the weights of a snapshot"):
            return TorchSnapshot.read(directory, self._base_model, self._model.targets, self._model.device)

    @override
    def restore(self, model_id: ModelId, spec: ModelSpec, source: Snapshot, parts: Collection[StatePart]) -> None:
        assert isinstance(source, TorchSnapshot)
        self._put(model_id, source.restore_into(self._fresh(spec.lora), spec, parts))

    # Sampling

    @override
    def load_sampler(self, sampler: SamplerId, source: Snapshot) -> None:
        assert isinstance(source, TorchSnapshot)
        if sampler not in self._samplers and len(self._samplers) >= self._config.max_samplers:
            raise CapacityError(f"all {self._config.max_samplers} sampler slots are taken")
        self._samplers.setdefault(sampler, source.state)

    @override
    def drop_sampler(self, sampler: SamplerId) -> None:
        self._samplers.pop(sampler, None)

    @override
    def begin_sample(self, batch: PreparedSampleBatch) -> None:
        self._open.begin(batch)

    @torch.no_grad()
    @override
    def step_sample(self) -> list[SampleDelta]:
        deltas: list[SampleDelta] = []
        with capacity_errors("running samples"):
            for sample in self._open.first(self._config.sample_slots):
                request = sample.request
                state = None if request.sampler is None else self._samplers[request.sampler]
                with self._model.apply_adapter(state and state.weights, state.rank if state else 1):
                    prompt = None
                    if sample.state is None:
                        sample.state = copy.deepcopy(self._prefill(request))
                        prompt = sampling.describe_prompt(self._model, request) if sample.index == 0 else None
                    deltas.append(sampling.decode(self._model, sample, self._config.slice_tokens, prompt))
        self._open.drop_ended()
        self._forget_prompts()
        return deltas

    @override
    def cancel_sample(self, request_ids: Collection[RequestId]) -> None:
        self._open.cancel(request_ids)
        self._forget_prompts()

    @override
    def end_sample(self, request_id: RequestId, index: int) -> None:
        self._open.end(request_id, index)

    @override
    def text_of(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    @cached_property
    def _tokenizer(self) -> Any:
        if not has_tokenizer(self._directory):
            raise UserError(f"stop: {self._base_model} has no tokenizer, which stop strings need; pass token ids")
        return load_tokenizer(self._directory)

    def _prefill(self, request: SampleRequest) -> tuple[torch.Tensor, Any]:
        """Return the logits after the prompt and its keys and values, computed once for all samples of a request."""
        if request.request_id not in self._prompts:
            tokens = torch.from_numpy(request.prompt.copy()).to(self._model.device)
            self._prompts[request.request_id] = self._model.extend(tokens, None)
        return self._prompts[request.request_id]

    def _forget_prompts(self) -> None:
        used = {sample.request.request_id for sample in self._open.first(len(self._open))}
        self._prompts = {request_id: prompt for request_id, prompt in self._prompts.items() if request_id in used}

    def _fresh(self, lora: LoraSpec) -> State:
        trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        targets: list[Target] = [target for target in self._model.targets if trained[target.group]]
        with capacity_errors("another model in training"):
            return State.fresh(lora, targets, self._model.device)

    def _put(self, model_id: ModelId, state: State) -> None:
        if model_id not in self._models and len(self._models) >= self._config.max_models:
            raise CapacityError(f"all {self._config.max_models} model slots are taken")
        self._models[model_id] = state


class TorchPass(ScratchPass[Tree]):
    """A pass that computes the examples of a micro-batch one after another, without padding."""

    def __init__(
        self,
        batch: PreparedModelPassBatch,
        config: TorchConfig,
        model: Model,
        models: dict[ModelId, State],
        *,
        backward: bool,
    ) -> None:
        super().__init__(batch, micro_batch_tokens=config.micro_batch_tokens)
        self._model = model
        self._models = models
        self._backward = backward

    @override
    def compute(self, examples: Sequence[PassExample]) -> tuple[list[PassResult], Tree | None]:
        results: list[PassResult] = []
        total: Tree | None = None
        with capacity_errors("a pass"):
            for example in examples:
                result, gradient = self._compute(example)
                results.append(result)
                total = gradient if total is None or gradient is None else total + gradient
        return results, total

    @override
    def commit(self, model_id: ModelId, gradient: Tree) -> None:
        state = self._models[model_id]
        self._models[model_id] = replace(state, gradient=state.gradient + gradient if state.gradient else gradient)

    def _compute(self, example: PassExample) -> tuple[PassResult, Tree | None]:
        state, device = self._models[example.model_id], self._model.device
        leaves = state.weights.map(lambda weight: weight.detach().requires_grad_(self._backward))
        targets = example.loss_inputs[TARGET_TOKENS]
        tokens = torch.from_numpy(example.tokens.copy()).to(device)
        targets_TK = torch.from_numpy(targets.reshape(targets.shape[0], -1).astype(np.int64)).to(device)
        with self._model.apply_adapter(leaves, state.rank), torch.set_grad_enabled(self._backward):
            logprobs_TK = self._model.logprobs(self._model.compute_hidden(tokens), targets_TK)
            logprobs = logprobs_TK.detach().cpu().numpy().reshape(targets.shape)
            value = loss_reference.evaluate(example.loss, logprobs, example.loss_inputs, example.loss_config)
            result = PassResult(logprobs=logprobs, sums={"loss": float(value.loss.sum())}, means=value.means)
            if not self._backward:
                return result, None
            slope = torch.from_numpy(value.slope.astype(np.float32)).to(device).reshape(logprobs_TK.shape)
            found = torch.autograd.grad(logprobs_TK, list(leaves.values()), slope, materialize_grads=True)
        return result, Tree(zip(leaves, found, strict=True))


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the tokens that end a generation: the end tokens of the model and of its tokenizer.

    The tokens of the model are in `generation_config.json`, or else in `config.json`.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not found and (directory / name).is_file():
            content = json.loads((directory / name).read_text(encoding="utf-8"))
            ids = content.get("eos_token_id", content.get("text_config", {}).get("eos_token_id"))
            found += ids if isinstance(ids, list) else [] if ids is None else [int(ids)]
    tokenizer_id = load_tokenizer(directory).eos_token_id if has_tokenizer(directory) else None
    return tuple(dict.fromkeys(found if tokenizer_id is None else [*found, tokenizer_id]))


def has_tokenizer(directory: Path) -> bool:
    """Return whether a model has the files of a tokenizer."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a model. Runs no code of the model."""
    return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


@contextmanager
def capacity_errors(need: str) -> Iterator[None]:
    """Turn exhausted memory of the device into CapacityError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the device has no memory for {need}") from error
