"""Evaluate custom losses in torch, as the SDK traces and runs them, in an environment with torch and the SDK.

    python custom_loss_reference.py

Prints JSON: the upload of each loss, and for each of two datums its inputs, value, gradient and
metrics.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

LENGTHS = (5, 12)
WIDTH = 3

Elementwise = Callable[..., torch.Tensor]

SUMMED_LOSSES: dict[str, Elementwise] = {
    "neg": lambda x, a, m: -x,
    "abs": lambda x, a, m: abs(x + 1.0) + torch.abs(x) + x.absolute(),
    "sign": lambda x, a, m: torch.sign(x) * x,
    "floor": lambda x, a, m: torch.floor(x) * x,
    "square": lambda x, a, m: torch.square(x) + x**2,
    "cube": lambda x, a, m: x**3,
    "power": lambda x, a, m: (-x) ** 1.5 + torch.pow(-x, a) + 2.0**x,
    "root": lambda x, a, m: torch.sqrt(-x) + (-x) ** 0.5,
    "reciprocal": lambda x, a, m: torch.reciprocal(x) + 1 / x + x**-1,
    "exp": lambda x, a, m: torch.exp(x) + x.exp() + torch.expm1(x) + torch.special.expm1(x),
    "log": lambda x, a, m: torch.log(-x) + torch.log1p(-x),
    "trigonometry": lambda x, a, m: torch.sin(x) * torch.cos(x),
    "sigmoid": lambda x, a, m: torch.sigmoid(x) + F.sigmoid(x) + torch.special.expit(x) + x.tanh() + F.tanh(x),
    "softplus": lambda x, a, m: F.softplus(x) + F.logsigmoid(x),
    "arithmetic": lambda x, a, m: (x + a) * (x - a) / (a + 2.0) + torch.add(x, a) - torch.mul(x, a) + torch.div(x, 3),
    "extremes": lambda x, a, m: torch.maximum(x, -a) + torch.minimum(x, -a) + torch.max(x, a) + torch.min(x, -a),
    "ties": lambda x, a, m: torch.maximum(x, x.detach()) + torch.minimum(x, x.detach()),
    "logaddexp": lambda x, a, m: torch.logaddexp(x, a),
    "clamp": lambda x, a, m: x.clamp(-1.0, -0.5) + torch.clamp(x, min=-0.7) + x.clamp(max=-0.6) + x.clip(-2, 0),
    "clamp_at_bounds": lambda x, a, m: torch.clamp(x, x.detach(), a) + x.clamp_min(-0.9) + x.clamp_max(-0.2),
    "relu": lambda x, a, m: F.relu(x + 0.7) + torch.relu(x - x.detach()) + (x + 1).relu(),
    "comparisons": lambda x, a, m: (
        (x > -0.5) * x + (x < -0.5).float() * a * x + (x >= a) * x + (x <= a) * x + (x == a) * x + (x != a) * x
    ),
    "logic": lambda x, a, m: (
        ((x > -0.8) & (a < 0.5)) * x + ((x > -0.8) | ~(a < 0.5)) * x + ((x > -0.8) ^ (a < 0.5)) * x + x * m.bool()
    ),
    "logical": lambda x, a, m: (
        torch.logical_and(m, x > -1) * x + torch.logical_or(m, a > 0.5) * x + torch.logical_not(m) * x
    ),
    "where": lambda x, a, m: torch.where(m > 0, x, a) + torch.where(x > -0.5, 0.0, x) + x.where(m.bool(), a),
    "masked_fill": lambda x, a, m: x.masked_fill(m == 0, 0.0) + torch.masked_fill(x, x > -0.4, -9.0).exp(),
    "detach": lambda x, a, m: x.detach() * x + x.clone() + x.contiguous(),
    "isnan": lambda x, a, m: torch.where(torch.isnan(x), 0.0, x),
    "to": lambda x, a, m: (x > -0.5).to(torch.float32) * x.to(dtype=torch.float32) + x.type(torch.float32),
    "likes": lambda x, a, m: torch.ones_like(x) * x + torch.zeros_like(x) + torch.full_like(x, 0.5) * a * x,
    "slices": lambda x, a, m: (x[1:] - x[:-1]).exp() + x[1:] * a[:-1],
    "slice_twice": lambda x, a, m: x[1:][:-2] * x[2:-1] + x[3:],
    "division_of_slices": lambda x, a, m: 1.0 / (x[1:] - x[:-1]),
    "cumsum": lambda x, a, m: torch.cumsum(x, 0).exp() + a.cumsum(dim=-1) * x,
    "softmax": lambda x, a, m: torch.softmax(x, 0) * a + F.softmax(x, dim=-1) ** 2 + F.log_softmax(x, 0) * a,
}
"""Functions of log-probabilities, another array and a mask, all [T].

The loss is the sum of the result.
"""

WHOLE_LOSSES: dict[str, Elementwise] = {
    "mean": lambda x, a, m: x.mean() + torch.mean(x * a),
    "masked_mean": lambda x, a, m: (x * m).sum() / m.sum().clamp(min=1),
    "count": lambda x, a, m: (x * a).sum() / (a > 0.5).sum(),
    "amax": lambda x, a, m: x.amax() * 2 + x.max() + torch.amin(x, 0) + x.min() + torch.max(x * a),
    "logsumexp": lambda x, a, m: torch.logsumexp(x, 0) + (x * a).logsumexp(dim=-1),
    "variance": lambda x, a, m: x.var() + torch.std(x) + x.var(unbiased=False) + x.std(dim=0, correction=0),
    "normalised": lambda x, a, m: (x * (a - a.mean()) / (a.std() + 1e-6)).sum(),
    "sizes": lambda x, a, m: x.sum() / x.shape[0] + x.sum() / x.size(0) * x.numel() + x.sum() * x.ndim * x.dim(),
    "items": lambda x, a, m: x[0] * x[-1] + x[1] * x[-2] + x[..., 2] + x[None, 0][0:].sum() * 0.5,
    "dot": lambda x, a, m: torch.dot(x, a) + x.dot(a),
    "keepdim": lambda x, a, m: (x - x.mean(dim=0, keepdim=True)).square().sum() + x.sum(0, keepdim=True).squeeze(0),
    "gspo": lambda x, a, m: -(torch.exp(((x - a) * m).sum().detach() / m.sum()) * torch.exp(x - x.detach()) * a).sum(),
    "square_error": lambda x, a, m: F.mse_loss(x, a) + F.mse_loss(x, m, reduction="sum") + (F.mse_loss(-1 * x, x * a)),
    "absolute_error": lambda x, a, m: F.l1_loss(x, a) + F.l1_loss(x, x.detach()) + F.l1_loss(x, a, reduction="sum"),
    "huber": lambda x, a, m: (
        F.huber_loss(x, a, delta=0.5)
        + (F.huber_loss(x, a, reduction="none", delta=2) * m).sum()
        + F.huber_loss(x, x.detach())
    ),
    "smooth_absolute_error": lambda x, a, m: (
        F.smooth_l1_loss(x, a) + F.smooth_l1_loss(x, a, reduction="sum", beta=0.25) + F.smooth_l1_loss(x, x.detach())
    ),
    "kl_of_positions": lambda x, a, m: (
        F.kl_div(x, a) + F.kl_div(x, a * m, reduction="batchmean") + F.kl_div(x, -a, log_target=True, reduction="sum")
    ),
    "products": lambda x, a, m: x @ a + torch.matmul(x, a) + torch.einsum("t,t", x, a * m) + torch.einsum("t->", x * a),
    "ppo": lambda x, a, m: -torch.minimum(torch.exp(x - a) * m, torch.clamp(torch.exp(x - a), 0.8, 1.2) * m).sum(),
}
"""Functions of the same arguments that return the loss itself."""


def use_largest(x: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    values, indices = x.topk(2)
    lowest = torch.topk(x, 2, dim=0, largest=False)
    return (
        (values * p.gather(1, indices)).sum()
        + (x.gather(-1, torch.topk(p, k=1, dim=1, sorted=False).indices).exp() * s).sum()
        + (lowest.values * p.gather(0, lowest[1])).square().sum()
        + x[:, 0].topk(3)[0].exp().sum()
        + (x.sum(1).gather(0, p[1:, 0].topk(2).indices) * x[:2, 1]).sum()
    )


def join_tensors(x: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    shifted = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    rest = torch.cat([x, x.sum(1, keepdim=True), p[:, :1]], dim=-1)
    return (
        (shifted * x.exp() * p).sum()
        + rest.logsumexp(-1).sum()
        + rest.cumsum(0)[1:, 1:-1].square().mean() * rest.shape[1]
        + (torch.concat((x[-2:], x[1:3]), 0) * x[:4]).sum()
        + torch.cat([rest[:, -2:] > 0.5, p > 0.3], 1).float().mul(rest).sum() * s
        + torch.cat([x[1:], x[0:1], p[-1:]]).softmax(0)[2:].square().sum()
    )


def stack_tensors(x: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    columns = torch.stack([x[:, 0], p[:, 1], x.sum(1)], dim=-1)
    return (
        columns.softmax(1)[:, 1].sum()
        + (columns[:, 1:] * columns[:, :-1]).exp().mean()
        + torch.stack([x, p, x * p]).amax(dim=0).square().sum()
        + torch.stack((x.sum(), s, x.mean())).logsumexp(0)
        + torch.stack([x > -1.0, p], 1).square().mul(x.unsqueeze(1)).sum()
        + columns.topk(2, 1).values.cumsum(-1).sin().sum()
    )


TARGET_LOSSES: dict[str, Elementwise] = {
    "distillation": lambda x, p, s: -(p * x).sum() * s,
    "kl": lambda x, p, s: (p * (torch.log(p) - torch.log_softmax(x, dim=-1))).sum(-1).mean(),
    "entropy": lambda x, p, s: -(x.softmax(-1) * F.log_softmax(x, dim=1)).sum(dim=(0, 1)) * s,
    "columns": lambda x, p, s: (x[:, 0] - x[:, -1]).exp().sum() + x[1:, 1:].sum() * s + x[0].logsumexp(0),
    "broadcast": lambda x, p, s: (x * p.sum(-1, keepdim=True) + x.amax(dim=1).unsqueeze(-1) * p).sum() * s,
    "sizes": lambda x, p, s: x.sum() / x.shape[1] + x.mean(dim=1).sum() + x.numel() * x.mean(),
    "cumsum": lambda x, p, s: (x.cumsum(1) * p).sum() + (torch.cumsum(x, 0) * p).sum(),
    "kl_div": lambda x, p, s: F.kl_div(F.log_softmax(x, -1), p, reduction="batchmean") + F.kl_div(x, p) * s,
    "kl_div_of_both": lambda x, p, s: F.kl_div(-x, x.exp(), reduction="sum") + F.kl_div(x, x * p, log_target=True),
    "nll": lambda x, p, s: (
        F.nll_loss(x, (p[:, 0] * 2.9).long())
        + F.nll_loss(x, (p[:, 1] * 2.9).long(), reduction="sum", ignore_index=0) * s
        + (F.nll_loss(x, (p[:, 2] * 2.9).to(torch.int64), reduction="none", ignore_index=1) * x[:, 0]).sum()
    ),
    "gather": lambda x, p, s: (
        (x.gather(1, (p[:, 1:] * 2.9).long()[:, 0].unsqueeze(1)) * p).sum()
        + torch.gather(x[1:], -1, (p[1:, 0, None] * 2).int().long()).exp().sum()
    ),
    "topk": use_largest,
    "cat": join_tensors,
    "stack": stack_tensors,
    "einsum": lambda x, p, s: (
        torch.einsum("tk,tk->t", x, p).exp().sum()
        + torch.einsum("k, tk, t -> t", x[0], p, x.sum(1)).square().sum()
        + torch.einsum("t,tk->tk", x[:, 0], p).sin().sum()
        + torch.einsum("tk->k", x).square().sum()
        + torch.einsum("tk,tk", x, p) * s
    ),
    "matmul": lambda x, p, s: (
        (x @ p[0]).exp().sum()
        + (x[:, 1] @ p).square().sum()
        + x.mv(p[-1]).sin().sum()
        + (x.sum(0, keepdim=True).matmul(p[0].unsqueeze(1))).sum()
        + (x[:, 0, None] @ p[None, 0]).cos().sum()
    ),
}
"""Losses of log-probabilities [T, K], a distribution [T, K], and a scalar."""


def make_loss(function: Elementwise, kind: str) -> tuple[Any, dict[str, int]]:
    if kind == "targets":

        def loss(logprobs, distribution, scale):  # type: ignore[no-untyped-def]
            value = function(logprobs, distribution, scale)
            return value, {"custom/value:mean": value, "custom/scale:sum": scale}

        ranks = {"logprobs": 2, "distribution": 2, "scale": 0}
        return loss, ranks

    def loss(logprobs, other, mask):  # type: ignore[no-untyped-def]
        value = function(logprobs, other, mask)
        value = value.sum() if kind == "one" else value
        return value, {"custom/value:sum": value}

    return loss, {"logprobs": 1, "other": 1, "mask": 1}


def arrays(kind: str, length: int, generator: np.random.Generator) -> list[np.ndarray]:
    if kind == "targets":
        logprobs = -generator.uniform(0.05, 2.0, (length, WIDTH))
        distribution = generator.dirichlet(np.ones(WIDTH) * 3, length)
        return [logprobs, distribution, np.array(generator.uniform(0.5, 1.5))]
    mask = np.array([0.0] + [1.0] * (length - 2) + [0.0])
    return [-generator.uniform(0.05, 2.0, length), generator.uniform(0.1, 1.0, length), mask]


def describe_loss(name: str, function: Elementwise, kind: str) -> dict[str, Any]:
    loss, ranks = make_loss(function, kind)
    handle = trace_loss(loss, ranks, "s")  # type: ignore[arg-type]
    upload = types.CreateCustomLossRequest(
        session_id="s", custom_loss_seq_id=0, name=name, inputs=list(handle.inputs), graph=encode_graph(handle)
    )
    generator, data = np.random.default_rng(sum(name.encode())), []

    for length in LENGTHS:
        given = [np.asarray(array, np.float32) for array in arrays(kind, length, generator)]
        logprobs = torch.tensor(given[0], requires_grad=True)
        value, metrics = handle.graph(logprobs, *map(torch.tensor, given[1:]))
        value.backward()
        assert logprobs.grad is not None

        data.append(
            {
                "inputs": [array.tolist() for array in given],
                "loss": value.item(),
                "gradient": logprobs.grad.tolist(),
                "metrics": {key: metric.item() for key, metric in metrics.items()},
            }
        )

    return {"upload": upload.model_dump(mode="json", exclude_none=True), "data": data}


def main() -> None:
    torch.set_num_threads(1)
    kinds = {"one": SUMMED_LOSSES, "all": WHOLE_LOSSES, "targets": TARGET_LOSSES}
    losses = {
        f"{kind}-{name}": describe_loss(name, function, kind)
        for kind, functions in kinds.items()
        for name, function in functions.items()
    }
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
