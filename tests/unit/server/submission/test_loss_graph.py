"""A graph is compiled to contract operations, or rejected with an error that names the node."""

import time
from typing import Any

import pytest
from pydantic import ValidationError

from skyrl_tx.contract.custom_loss import CustomLoss, Operation
from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.schemas.training import CreateCustomLossRequest
from skyrl_tx.server.submission.loss_graph.compile import compile_loss

REF = {"ref": "logprobs"}
WEIGHTS = {"ref": "weights"}


def node(op: str, name: str, target: str, *args: object, **kwargs: object) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def call(name: str, target: str, *args: object, **kwargs: object) -> dict[str, Any]:
    return node("call_function", name, target, *args, **kwargs)


def method(name: str, target: str, *args: object, **kwargs: object) -> dict[str, Any]:
    return node("call_method", name, target, *args, **kwargs)


def output(loss: object, **metrics: object) -> dict[str, Any]:
    return node("output", "output", "output", {"tuple": [loss, {"dict": metrics}]})


PLACEHOLDERS = [node("placeholder", "logprobs", "logprobs"), node("placeholder", "weights", "weights")]
SUM = method("sum_1", "sum", REF)
TOTAL = {"ref": "sum_1"}
MEAN = method("scalar", "mean", REF)
SCALAR = {"ref": "scalar"}


def upload(*nodes: dict[str, Any], ranks: tuple[int, int] = (1, 1), **changes: Any) -> CreateCustomLossRequest:
    body = {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "loss",
        "inputs": [{"name": name, "rank": rank} for name, rank in zip(("logprobs", "weights"), ranks, strict=True)],
        "graph": {"format": 1, "nodes": [*PLACEHOLDERS, *nodes]},
    }
    return CreateCustomLossRequest.model_validate({**body, **changes})


def compile_nodes(*nodes: dict[str, Any], **changes: Any) -> CustomLoss:
    return compile_loss(upload(*nodes, **changes))


def test_a_graph_becomes_operations_and_what_is_not_needed_is_left_out() -> None:
    loss = compile_nodes(
        call("mul", "operator.mul", REF, WEIGHTS),
        call("unused", "torch.exp", REF),
        method("sum_1", "sum", {"ref": "mul"}),
        call("neg", "operator.neg", TOTAL),
        call("twice", "operator.mul", {"ref": "neg"}, 2),
        output({"ref": "twice"}, **{"custom/total:sum": TOTAL}),
    )

    assert loss.constants == (2.0,) and [loss_input.name for loss_input in loss.inputs] == ["logprobs", "weights"]
    assert loss.operations == (
        Operation(name="mul", values=(0, 1)),
        Operation(name="sum", values=(3,), options=(0, 0)),
        Operation(name="neg", values=(4,)),
        Operation(name="mul", values=(5, 2)),
    )
    assert (loss.loss, loss.metrics) == (6, {"custom/total:sum": 4})


def test_a_loss_knows_the_fewest_sizes_and_its_elements() -> None:
    loss = compile_nodes(
        call("ends", "operator.getitem", REF, {"slice": [2, -1, None]}),
        call("item", "operator.getitem", {"ref": "ends"}, {"tuple": [-3, 4]}),
        output({"ref": "item"}),
        ranks=(2, 1),
    )
    needs = loss.needs()
    assert (needs.positions, needs.targets) == (6, 5)
    assert needs.num_elements(10, 5) == 50 + 10 + 50 + 5 + 1


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        # Unknown operations and names.
        ([call("e", "os.system", "ls")], "graph.nodes[2] 'e': function 'os.system' is not supported"),
        ([call("e", "builtins.eval", "1")], "function 'builtins.eval' is not supported"),
        ([call("e", "torch.load", "/etc/passwd")], "function 'torch.load' is not supported"),
        ([call("e", "torch.ops.aten.add", REF, REF)], "function 'torch.ops.aten.add' is not supported"),
        ([call("e", "torch.linalg.svd", REF)], "pass the function itself to forward_backward_custom"),
        ([method("e", "item", REF)], "method 'item' is not supported"),
        ([method("e", "add_", REF, 1)], "method 'add_' is not supported"),
        ([method("e", "__reduce__", REF)], "method '__reduce__' is not supported"),
        ([call("e", "getattr", REF, "__class__")], "the supported attributes of a tensor are shape and ndim"),
        ([call("e", "getattr", REF, "grad_fn")], "the supported attributes of a tensor"),
        ([call("e", "getattr", 1, "shape")], "argument input must be a tensor, not 1"),
        ([node("get_attr", "e", "_tensor_constant0")], "op 'get_attr' is not supported"),
        ([node("call_module", "e", "linear", REF)], "op 'call_module' is not supported"),
        ([node("exec", "e", "e")], "op 'exec' is not supported"),
        # Sizes.
        ([method("e", "expand", REF, 1_000_000_000)], "method 'expand' is not supported"),
        ([method("e", "repeat", REF, 1_000_000)], "method 'repeat' is not supported"),
        ([call("e", "torch.zeros", 1_000_000_000)], "function 'torch.zeros' is not supported"),
        ([call("e", "torch.cat", [REF, WEIGHTS])], "cannot be joined on dimension 0: only one of them may depend on"),
        (
            [
                call("a", "torch.stack", [REF] * 9),
                call("e", "torch.stack", [{"ref": "a"}] * 8),
            ],
            "shape [8, 9, T] has more than 64 elements that do not depend on the datum",
        ),
        (
            [
                *(MEAN, call("a", "torch.stack", [SCALAR] * 60)),
                call("b", "torch.cat", [{"ref": "a"}, REF]),
                call("e", "torch.cat", [{"ref": "a"}, {"ref": "b"}]),
            ],
            "shape [T+120] has more than 64 elements",
        ),
        ([call("e", "torch.cat", REF)], "argument tensors must be a list of tensors"),
        ([call("e", "torch.cat", [REF, 1.0])], "argument tensors must be a list of tensors"),
        ([call("e", "torch.stack", [])], "argument tensors must be a list of tensors"),
        ([MEAN, call("e", "torch.cat", [SCALAR, SCALAR])], "argument dim 0 is outside a tensor of 0 dimensions"),
        ([MEAN, call("e", "torch.cat", [REF, SCALAR])], "takes tensors of as many dimensions, not [T], []"),
        (
            [
                call("a", "operator.getitem", REF, {"slice": [1, None, None]}),
                call("e", "torch.stack", [{"ref": "a"}, REF]),
            ],
            "takes tensors of one shape, not [T-1], [T]",
        ),
        ([method("e", "topk", REF, 0)], "argument k must be a whole number from 1 to 64"),
        ([method("e", "topk", REF, 65)], "argument k must be a whole number from 1 to 64"),
        ([method("e", "topk", REF, WEIGHTS)], "argument k must be a whole number"),
        ([MEAN, method("e", "topk", SCALAR, 1)], "argument dim -1 is outside a tensor of 0 dimensions"),
        ([method("e", "topk", REF, 1, 1)], "argument dim 1 is outside a tensor of 1 dimensions"),
        (
            [call("a", "torch.stack", [REF, REF]), method("e", "topk", {"ref": "a"}, 3, 0)],
            "dimension 0 of [2, T] is too small",
        ),
        (
            [method("a", "topk", REF, 2), call("e", "operator.getitem", {"ref": "a"}, 2)],
            "the index of 2 values must be a whole number from -2 to 1, not",
        ),
        ([call("e", "getattr", [REF], "indices")], "argument input must be a tensor, not a list"),
        (
            [
                *(method("a", "unsqueeze", REF, 0), method("b", "unsqueeze", REF, 1)),
                call("e", "operator.mul", {"ref": "a"}, {"ref": "b"}),
            ],
            "shape [T, T] grows with the square of the length",
        ),
        (
            [call("a", "operator.getitem", REF, {"slice": [1, None, None]}), call("e", "torch.add", {"ref": "a"}, REF)],
            "shapes [T-1] and [T] do not broadcast",
        ),
        # References.
        ([call("e", "torch.exp", {"ref": "e"})], "graph.nodes[2] 'e': reads node 'e', which is not before it"),
        ([call("a", "torch.exp", {"ref": "b"}), call("b", "torch.exp", {"ref": "a"})], "reads node 'b'"),
        ([call("logprobs", "torch.exp", REF)], "has the name of an earlier node"),
        ([output(TOTAL), SUM], "reads node 'sum_1'"),
        (
            [node("placeholder", "more", "more")],
            "is placeholder 'more'; the placeholders must be the names in `inputs`",
        ),
        # Arguments.
        ([call("e", "torch.exp")], "function 'torch.exp': argument input is missing"),
        ([call("e", "torch.exp", REF, REF)], "has 2 arguments; it takes at most 1 here: input"),
        ([call("e", "torch.exp", REF, out=REF)], "argument 'out' is not supported"),
        ([call("e", "torch.exp", REF, input=REF)], "argument input is given twice"),
        ([call("e", "torch.exp", "logprobs")], "argument input must be a tensor or a number, not 'logprobs'"),
        ([call("e", "operator.add", REF, None)], "argument other must be a tensor or a number, not None"),
        ([call("e", "operator.add", REF, {"float": "nan"})], "a constant is NaN"),
        ([call("e", "operator.add", REF, {"float": "1e5"})], "is not understood"),
        ([call("e", "operator.add", REF, 10**300)], "a constant does not fit float32"),
        ([call("e", "operator.add", REF, -1e39)], "a constant does not fit float32"),
        ([call("e", "operator.add", REF, {"device": "cuda"})], "is not understood"),
        ([call("e", "operator.add", REF, {"ref": "logprobs", "also": 1})], "is not understood"),
        ([call("e", "operator.add", REF, [[[[[[1]]]]]])], "nested more than 4 levels deep"),
        ([call("e", "operator.add", REF, [0] * 65)], "a list has 65 items"),
        ([method("e", "sum", REF, dim=1)], "argument dim 1 is outside a tensor of 1 dimensions"),
        ([method("e", "sum", REF, dim=True)], "argument dim must be a whole number, not True"),
        ([method("e", "sum", REF, dim=10**30)], "outside a tensor"),
        ([method("e", "sum", REF, dim=[0, 0])], "names a dimension twice"),
        ([method("e", "sum", REF, dtype={"dtype": "float64"})], "losses are computed in float32"),
        ([method("e", "to", REF, {"dtype": "bfloat16"})], "only the dtypes torch.float32 and torch.bool"),
        (
            [method("e", "max", REF, 0)],
            "max and min over a dimension, which also return indices, are not supported; use amax",
        ),
        ([call("e", "torch.where", REF, REF, REF)], "argument condition must be a bool tensor"),
        ([call("e", "operator.and_", REF, REF)], "need bool tensors"),
        ([call("e", "torch.clamp", REF)], "one of the arguments min and max is needed"),
        ([call("e", "torch.div", REF, 2, rounding_mode="floor")], "argument rounding_mode 'floor' is not supported"),
        # Composed functions.
        ([call("e", "torch.nn.functional.mse_loss", REF, WEIGHTS, weight=REF)], "argument weight is not supported"),
        ([call("e", "torch.nn.functional.mse_loss", REF, WEIGHTS, reduce=True)], "argument reduce True is not"),
        ([call("e", "torch.nn.functional.l1_loss", REF, WEIGHTS, reduction="max")], "argument reduction must be"),
        (
            [call("e", "torch.nn.functional.huber_loss", REF, WEIGHTS, delta=-1)],
            "argument delta must be a number above",
        ),
        ([call("e", "torch.nn.functional.huber_loss", REF, WEIGHTS, delta=REF)], "argument delta must be a number"),
        ([call("e", "torch.nn.functional.nll_loss", REF, WEIGHTS)], "takes tensors [T, K] and [T], not [T] and [T]"),
        ([method("e", "gather", REF, 0, WEIGHTS)], "such as [T, K], dim 1 and [T, 1], not [T], dim 0 and [T]"),
        ([call("e", "torch.functional.einsum", "i,j->ij", REF, WEIGHTS)], "grows with the square of the length"),
        ([call("e", "torch.functional.einsum", "ii->i", REF)], "ii does not fit tensors [T]"),
        ([call("e", "torch.functional.einsum", "t->tt", REF)], "subscripts 'tt' need a diagonal or a transposed"),
        ([call("e", "torch.functional.einsum", "t->k", REF)], "subscripts 'k' must be letters of the operands"),
        ([call("e", "torch.functional.einsum", "t->.", REF)], "subscripts '.' must be letters of the operands"),
        ([call("e", "torch.functional.einsum", "t", REF, REF)], "t does not fit tensors [T], [T]"),
        ([call("e", "torch.functional.einsum", "t" * 65, REF)], "argument equation must be a text of at most 64"),
        ([call("e", "torch.functional.einsum", "t")], "argument first is missing"),
        (
            [
                call("a", "operator.getitem", REF, {"slice": [1, None, None]}),
                call("e", "operator.matmul", {"ref": "a"}, REF),
            ],
            "k,k does not fit tensors [T-1], [T]",
        ),
        # Indices.
        ([call("e", "operator.getitem", REF, WEIGHTS)], "use torch.where for a mask"),
        (
            [call("e", "operator.getitem", REF, {"slice": [None, 5.5, None]})],
            "a slice must start and end at whole numbers",
        ),
        ([call("e", "operator.getitem", REF, {"slice": [5, 5, None]})], "a slice must have at least one element"),
        (
            [call("e", "operator.getitem", REF, {"slice": [-3, 5, None]})],
            "that starts at a negative index must end at a negative index",
        ),
        ([call("e", "operator.getitem", REF, {"slice": [None, 65, None]})], "shape [65] has more than 64 elements"),
        (
            [
                call("a", "torch.stack", [REF, REF]),
                call("e", "operator.getitem", {"ref": "a"}, {"slice": [2, None, None]}),
            ],
            "dimension 0 of [2, T] is too small",
        ),
        ([call("a", "torch.stack", [REF, REF]), call("e", "operator.getitem", {"ref": "a"}, 2)], "is too small"),
        ([call("e", "operator.getitem", REF, {"slice": [None, None, 2]})], "slices with a step are not supported"),
        ([call("e", "operator.getitem", REF, {"slice": [10**9, None, None]})], "an index must be at most 4096"),
        ([call("e", "operator.getitem", REF, {"tuple": [0, 0]})], "2 indices do not fit a tensor [T]"),
        # The output.
        ([output(REF)], "the loss has shape [T]; must be a scalar"),
        ([output(1.0)], "the loss must be a tensor"),
        ([output("loss")], "the loss must be a tensor"),
        ([method("e", "sum", WEIGHTS), output({"ref": "e"})], "the loss does not depend on logprobs"),
        ([method("e", "detach", REF), method("f", "sum", {"ref": "e"}), output({"ref": "f"})], "does not depend on"),
        ([SUM, node("output", "output", "output", TOTAL)], "must return (loss, metrics)"),
        ([SUM, output(TOTAL, **{"loss:sum": TOTAL})], "metric 'loss:sum' must be named custom/<name>:sum"),
        ([SUM, output(TOTAL, **{"custom/a:sum": REF})], "metric custom/a:sum has shape [T]"),
        ([SUM, output(TOTAL, **{f"custom/{i}:sum": TOTAL for i in range(33)})], "has 33 metrics; must have at most 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_graph_is_refused_with_its_node(nodes: list[dict[str, Any]], text: str) -> None:
    end = [] if nodes[-1]["op"] == "output" else [SUM, output(TOTAL)]
    with pytest.raises(UserError) as raised:
        compile_nodes(*nodes, *end)
    assert text in raised.value.message and raised.value.message.startswith("graph.nodes[")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": []}, "inputs: has 0 names"),
        ({"inputs": [{"name": "weights", "rank": 1}]}, "inputs[0].name 'weights': must be 'logprobs'"),
        ({"inputs": [{"name": "logprobs", "rank": 0}]}, "inputs[0].rank 0: must be from 1 to 2"),
        ({"inputs": [{"name": "logprobs", "rank": 3}]}, "inputs[0].rank 3"),
        ({"inputs": [{"name": "logprobs", "rank": 1}, {"name": "__init__.x", "rank": 1}]}, "inputs[1].name"),
        ({"inputs": [{"name": "logprobs", "rank": 1}] * 2}, "inputs: a name is there twice"),
        ({"inputs": [{"name": "logprobs", "rank": 1}]}, "is placeholder 'weights'"),
        ({"inputs": [{"name": name, "rank": 1} for name in ("logprobs", "weights", "a")]}, "more names than the graph"),
        ({"graph": {"format": 2, "nodes": []}}, "graph.format 2: this server reads 1"),
        ({"graph": {"format": 1, "nodes": []}}, "graph.nodes: the last node must be the output"),
        ({"graph": {"nodes": [*PLACEHOLDERS, SUM]}}, "graph.nodes: the last node must be the output"),
        ({"graph": {"nodes": [{**PLACEHOLDERS[0], "users": 3}, SUM, output(TOTAL)]}}, "users 3: this server does not"),
    ],
)
def test_a_wrong_upload_is_refused_with_its_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as raised:
        compile_nodes(SUM, output(TOTAL), **changes)
    assert text in raised.value.message


@pytest.mark.parametrize("count", [513, 100_000])
def test_too_many_nodes_are_refused_before_they_are_read(count: int) -> None:
    nodes = [call(f"n{index}", "torch.exp", REF) for index in range(count)]
    started = time.thread_time()
    with pytest.raises(ValidationError) as raised:
        upload(*nodes)
    assert time.thread_time() - started < 1.0
    assert "at most 512" in str(raised.value)


def test_operations_of_many_nodes_are_bounded() -> None:
    nodes = [method(f"n{index}", "std", REF) for index in range(300)]
    with pytest.raises(UserError, match="the loss has more than 256 operations"):
        compile_nodes(*nodes, SUM, output(TOTAL))


def test_a_chain_of_powers_has_one_operation_each_and_no_larger_value() -> None:
    chain = [call(f"n{i}", "operator.mul", {"ref": f"n{i - 1}" if i else "logprobs"}, REF) for i in range(200)]
    loss = compile_nodes(*chain, method("sum_1", "sum", {"ref": "n199"}), output(TOTAL))
    assert len(loss.operations) == 201 and loss.needs().num_elements(100, 1) == 2 * 100 + 200 * 100 + 1


def test_picking_a_target_takes_no_more_memory_than_the_inputs() -> None:
    loss = compile_nodes(
        method("index", "unsqueeze", WEIGHTS, 1),
        call("picked", "torch.gather", REF, 1, {"ref": "index"}),
        method("sum_1", "sum", {"ref": "picked"}),
        output(TOTAL),
        ranks=(2, 1),
    )
    assert loss.needs().num_elements(1000, 50) < 8 * 1000 * 50


def test_sizes_of_joined_and_selected_tensors_count() -> None:
    loss = compile_nodes(
        method("largest", "topk", REF, 4, 1),
        call("values", "getattr", {"ref": "largest"}, "values"),  # [T, 4]
        call("ends", "operator.getitem", REF, {"slice": [-7, None, None]}),  # [7, K]
        call("longer", "torch.cat", [REF, {"ref": "ends"}]),  # [T+7, K]
        method("first", "sum", {"ref": "values"}),
        method("second", "sum", {"ref": "longer"}),
        call("total", "operator.add", {"ref": "first"}, {"ref": "second"}),
        output({"ref": "total"}),
        ranks=(2, 1),
    )
    needs = loss.needs()
    assert (needs.positions, needs.targets) == (7, 4)
    inputs = 100 * 5 + 100
    assert needs.num_elements(100, 5) == inputs + 100 * 4 + 7 * 5 + 107 * 5 + 3
