"""Compute reference results with transformers, peft and torch, in the torch environment.

    python transformers_reference.py MODEL_DIRECTORY...

Reads `inputs.npz` in each directory and writes `reference.npz`. Adapter arrays are named by the modules in the
checkpoint, such as `model.layers.0.self_attn.q_proj`, with peft's orientation: A [R, in], B [out, R].
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 32
NOT_ADAPTED = ("in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate", "q_b_proj", "kv_b_proj")
FUSED = ("in_proj_qkv", "in_proj_qkvz", "in_proj")
"""Modules that fuse multiple maps. Each map has its own adapter."""
BY_HAND = ("up_proj", "down_proj", "_latent_proj", "out_proj")
"""Maps of Nemotron-H that are adapted by hand: its feed-forward maps, and `out_proj`.

Peft refuses to adapt `out_proj`, because fused kernels would bypass the adapter.
"""
PROMPT, NEW = 20, 24  # tokens of greedy decoding
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.1}
STEPS = 3


def main(directory: Path) -> None:
    torch.manual_seed(0)
    given = np.load(directory / "inputs.npz")
    tokens, targets = torch.tensor(given["tokens"]), torch.tensor(given["targets"])
    weights = torch.tensor(given["weights"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    saved: dict[str, np.ndarray] = {}
    with torch.no_grad():
        saved["base_logits"] = model(tokens).logits.numpy()
    saved["base_decoded"] = decode(model, tokens)

    model = adapt(model, shares_factors=bool(given["shares_factors"]))
    mixtures = [module for module in model.modules() if isinstance(module, AdaptedExperts)]
    adapter = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in adapter.values():
        weight.data = 0.1 * torch.randn_like(weight)
    saved["decoded"] = decode(model, tokens)
    optimizer = torch.optim.AdamW(adapter.values(), **ADAM)

    for step in range(STEPS):
        for name, weight in adapter.items():
            saved[f"weights{step}/{plain(name)}"] = weight.detach().numpy().copy()
        logits = model(tokens).logits
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        loss = -(weights * logprobs).sum()

        optimizer.zero_grad()
        loss.backward()
        saved[f"loss{step}"] = loss.detach().numpy()
        saved[f"logprobs{step}"] = logprobs.detach().numpy()
        if step == 0:
            saved["logits"] = logits.detach().numpy()
            if mixtures:
                saved["chosen"] = torch.stack([experts.chosen for experts in mixtures]).numpy()
        for name, weight in adapter.items():
            saved[f"gradients{step}/{plain(name)}"] = weight.grad.numpy().copy()
        optimizer.step()

    for name, weight in adapter.items():
        saved[f"weights{STEPS}/{plain(name)}"] = weight.detach().numpy().copy()
    np.savez(directory / "reference.npz", **saved)


def adapt(model: torch.nn.Module, *, shares_factors: bool) -> torch.nn.Module:
    """Add adapters to all linear maps except routers and gates: with peft, or by hand if peft does not support the map.

    With `shares_factors`, the experts of a layer share A of gate and up, and B of down.
    """
    is_tied, by_hand = model.config.tie_word_embeddings, []
    maps = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(NOT_ADAPTED)
    ]
    fused = [name for name in maps if name.endswith(FUSED)]  # peft treats each as a single map
    maps = [name for name in maps if name not in fused]
    parts = [getattr(layer, "mlp", None) or layer.mixer for layer in model.model.layers]

    mixtures = [part for part in parts if hasattr(part, "experts")]
    if mixtures:  # peft would fuse gates with up-projections
        by_hand += [name for name in maps if ".mlp." in name or (".mixer." in name and name.endswith(BY_HAND))]
    if is_tied:
        by_hand.append("lm_head")
    with_peft = [name for name in maps if name not in by_hand]
    wrapped = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=with_peft, lora_dropout=0.0))
    for name in by_hand:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, AdaptedMap(model.get_submodule(name)))

    for name in fused:
        net = model.get_submodule(name.rpartition(".")[0])
        if hasattr(net, "in_proj"):
            sizes = {"gate_proj": net.intermediate_size, "x_proj": net.intermediate_size}
            net.in_proj = AdaptedRows(net.in_proj, sizes)
            continue
        rows = {"in_proj_q": net.key_dim, "in_proj_k": net.key_dim, "in_proj_v": net.value_dim}
        if hasattr(net, "in_proj_qkvz"):
            net.in_proj_qkvz = AdaptedRows(net.in_proj_qkvz, rows | {"in_proj_z": net.value_dim}, net.num_k_heads)
        else:
            net.in_proj_qkv = AdaptedRows(net.in_proj_qkv, rows)

    for mixture in mixtures:
        mixture.experts = get_adapter_class(mixture.experts)(mixture.experts)
        if shares_factors:
            mixture.experts.share_factors()
    return wrapped


def get_adapter_class(experts: torch.nn.Module) -> type["AdaptedExperts"]:
    """Return the class that adapts these experts."""
    if hasattr(experts, "gate_up_proj_bias"):
        return AdaptedGptOssExperts
    return AdaptedExperts if hasattr(experts, "gate_up_proj") else AdaptedUngatedExperts


class Update(torch.nn.Module):
    """The LoRA update of one linear map."""

    def __init__(self, size_in: int, size_out: int):
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.zeros(RANK, size_in))
        self.lora_B = torch.nn.Parameter(torch.zeros(size_out, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.lora_A.T) @ self.lora_B.T * (ALPHA / RANK)


class AdaptedMap(Update):
    """A linear map with its LoRA update."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__(base.in_features, base.out_features)
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + super().forward(x)


class AdaptedRows(torch.nn.Module):
    """A linear map that fuses multiple maps in its first rows, head by head.

    Each map has its own LoRA update.
    """

    def __init__(self, base: torch.nn.Linear, rows: dict[str, int], num_heads: int = 1):
        super().__init__()
        self.base = base
        self.num_heads = num_heads
        for name, size in rows.items():
            self.add_module(name, Update(base.in_features, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        updates = [module(x) for module in self.children() if isinstance(module, Update)]
        by_head = [update.unflatten(-1, (self.num_heads, -1)) for update in updates]
        update = torch.cat(by_head, dim=-1).flatten(-2)
        return self.base(x) + torch.nn.functional.pad(update, (0, self.base.out_features - update.shape[-1]))


class AdaptedExperts(torch.nn.Module):
    """The experts of a layer, with a LoRA update for each map of each expert."""

    first = ("gate_proj", "up_proj")

    def __init__(self, base: torch.nn.Module):
        super().__init__()
        self.base = base
        inner, outer = self.sizes(base)
        for index in range(base.num_experts):
            maps = {name: Update(outer, inner) for name in self.first}
            self.add_module(str(index), torch.nn.ModuleDict(maps | {"down_proj": Update(inner, outer)}))

    def share_factors(self) -> None:
        """Let all experts share the factors of the first expert next to the hidden size."""
        first = getattr(self, "0")
        for index in range(1, self.base.num_experts):
            maps = getattr(self, str(index))
            for name in self.first:
                maps[name].lora_A = first[name].lora_A
            maps["down_proj"].lora_B = first["down_proj"].lora_B

    def sizes(self, base: torch.nn.Module) -> tuple[int, int]:
        """Return the sizes of an expert and of its inputs."""
        return base.gate_up_proj.shape[1] // 2, base.gate_up_proj.shape[2]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        self.chosen = chosen  # [M, K], the experts of each token
        out = torch.zeros_like(x)
        for index in range(self.base.num_experts):
            rows, ways = torch.where(chosen == index)
            maps, mine = getattr(self, str(index)), x[rows]
            gate, up = (mine @ self.base.gate_up_proj[index].T).chunk(2, dim=-1)
            y = self.base.act_fn(gate + maps["gate_proj"](mine)) * (up + maps["up_proj"](mine))
            y = y @ self.base.down_proj[index].T + maps["down_proj"](y)
            out = out.index_add(0, rows, y * shares[rows, ways, None])
        return out


class AdaptedGptOssExperts(AdaptedExperts):
    """Adapted experts of gpt-oss, which have biases and alternating columns of gate and up."""

    def sizes(self, base: torch.nn.Module) -> tuple[int, int]:
        return base.gate_up_proj.shape[2] // 2, base.gate_up_proj.shape[1]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        self.chosen = chosen  # [M, K], the experts of each token
        out, base = torch.zeros_like(x), self.base
        for index in range(base.num_experts):
            rows, ways = torch.where(chosen == index)
            maps, mine = getattr(self, str(index)), x[rows]
            gate_up = mine @ base.gate_up_proj[index] + base.gate_up_proj_bias[index]
            gate_up = gate_up + torch.stack([maps["gate_proj"](mine), maps["up_proj"](mine)], dim=-1).flatten(-2)
            y = base._apply_gate(gate_up)
            y = y @ base.down_proj[index] + base.down_proj_bias[index] + maps["down_proj"](y)
            out = out.index_add(0, rows, y * shares[rows, ways, None])
        return out


class AdaptedUngatedExperts(AdaptedExperts):
    """Adapted experts of Nemotron-H, which have no gates."""

    first = ("up_proj",)

    def sizes(self, base: torch.nn.Module) -> tuple[int, int]:
        return base.up_proj.shape[1], base.up_proj.shape[2]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        self.chosen = chosen  # [M, K], the experts of each token
        out = torch.zeros_like(x)
        for index in range(self.base.num_experts):
            rows, ways = torch.where(chosen == index)
            maps, mine = getattr(self, str(index)), x[rows]
            y = self.base.act_fn(mine @ self.base.up_proj[index].T + maps["up_proj"](mine))
            y = y @ self.base.down_proj[index].T + maps["down_proj"](y)
            out = out.index_add(0, rows, y * shares[rows, ways, None])
        return out


def decode(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Decode greedily from the first tokens of each row, ignoring end-of-sequence tokens."""
    prompts = tokens[:, :PROMPT]
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings)[:, PROMPT:].numpy()


def plain(name: str) -> str:
    """Convert `base_model.model.X.lora_A.default.weight` to `X.lora_A`."""
    name = name.removeprefix("base_model.model.")
    for fused in FUSED:
        name = name.replace(f".{fused}.", ".")
    if name in ("lm_head.lora_A", "lm_head.lora_B"):  # tied embeddings: files use another name
        return name.replace("lm_head", "model.unembed_tokens")
    return name.removesuffix(".default.weight")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        main(Path(argument))
