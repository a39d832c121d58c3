"""Compile training programs in the background, the most likely shapes first.

Programs are compiled from shapes alone, so compilation begins while the base weights are being
read.
"""

import hashlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from skyrl_tx import models
from skyrl_tx.backends.jax.compiler import CompiledProgram, Compiler, Popularity, Program
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory_plan import MemoryPlan
from skyrl_tx.backends.jax.mesh import get_parameter_sharding, map_factors
from skyrl_tx.backends.jax.shapes import iter_ascending
from skyrl_tx.backends.jax.train import forward_backward, packing
from skyrl_tx.backends.jax.train.training_state import pad_rank
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK
from skyrl_tx.layers.kernels.registry import Kernels
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.layers.parameter import Parameter, map_named
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.layers.sharding import Layout


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """Everything that a training program is compiled for."""

    num_rows: int
    length: int
    """Length of each row."""
    num_targets: int
    """Targets per position."""
    rank: int
    """The padded LoRA rank."""
    remat: RematPolicy | None
    """How `forward_backward.accumulate` rematerializes; None is `forward_backward.forward`."""
    is_local: bool = True
    """Whether the loss is local: the loss of a position depends only on arrays at that position."""
    has_prefixes: bool = False
    """Whether examples of a row share prefixes."""

    @property
    def name(self) -> str:
        """The name in the file of popular programs.

        The name does not contain `remat`, which follows from the memory plan.
        """
        name = f"{self.num_rows} {self.length} {self.num_targets} {self.rank} {int(self.is_local)}"
        return f"{name} 1" if self.has_prefixes else name


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShapes:
    """The micro-batch shapes that are possible with the settings of a server."""

    budget: int
    """Maximum tokens of a row. Only a row with one longer example has more tokens."""
    num_rows: int
    multiple: int
    """The number of devices that share the tokens of a row. Row lengths are a multiple of it."""
    rank: int
    """The padded LoRA rank that clients use by default."""
    shares_prefixes: bool = False
    """Whether examples of a row may share prefixes."""
    remat: Any  # the remat policy of a micro-batch: (tokens of all rows) -> RematPolicy

    @classmethod
    def from_plan(
        cls, plan: MemoryPlan, config: JaxConfig, layout: Layout, shares_prefixes: bool
    ) -> "MicroBatchShapes":
        """Return the shapes with a memory plan. `layout` is the layout of training."""
        num_rows, num_splits = layout.num_shards("batch"), layout.num_shards("tokens")
        return cls(
            budget=max(1, plan.micro_batch_tokens // num_rows),
            num_rows=num_rows,
            multiple=num_splits,
            rank=pad_rank(min(DEFAULT_RANK, config.max_lora_rank)),
            shares_prefixes=shares_prefixes,
            remat=lambda num_tokens: plan.get_remat_policy(num_tokens // (num_rows * num_splits)),
        )

    def iter_usual(self, popular: Iterator[str]) -> Iterator[MicroBatchShape]:
        """Yield the shapes that nearly every server needs. Shapes may repeat.

        The order is: popular programs in the order of `popular`, full micro-batches, the last
        micro-batches of long requests. Only popular programs can have losses that are not local. A
        popular program from another version or other settings may be impossible with these
        settings, and is then skipped.
        """
        # Popular programs
        for name in popular:
            fields = name.split()
            if len(fields) in (5, 6) and all(field.isdigit() for field in fields):
                *sizes, is_local, has_prefixes = map(int, [*fields, "0"][:6])
                budgets = [self.budget, packing.leave_room_for_states(self.budget)][: 1 + has_prefixes]
                is_possible = any(self._is_possible(*sizes[:3], max_tokens=budget) for budget in budgets)
                if is_possible and (self.shares_prefixes or not has_prefixes):
                    shape = self._make_shape(*sizes, is_local=bool(is_local))
                    yield replace(shape, has_prefixes=bool(has_prefixes))

        # Full and last micro-batches
        parts = range(packing.NUM_REMAINDER_LENGTHS, 0, -1) if self.num_rows == 1 else ()
        totals = (max(1, part * self.budget // packing.NUM_REMAINDER_LENGTHS) for part in parts)
        yield self._make_shape_by_length(self.budget)
        yield from (self._make_shape_by_length(packing.choose_remainder_length(total, self.budget)) for total in totals)

    def iter_lengths(self) -> Iterator[MicroBatchShape]:
        """Yield the shapes of all lengths up to the budget, in ascending order."""
        lengths = iter_ascending(lambda size: packing.choose_micro_batch_length(size, self.budget), self.budget)
        yield from map(self._make_shape_by_length, lengths)

    def _is_possible(self, num_rows: int, length: int, num_targets: int, *, max_tokens: int) -> bool:
        """Return whether a micro-batch of at most `max_tokens` tokens can have this shape."""
        if num_rows != self.num_rows or num_targets == 0:
            return False
        budget = packing.choose_row_budget(max_tokens, num_targets, num_rows)
        sizes = range(max(length - self.multiple, 0) + 1, length + 1)
        return any(self._round_up(packing.choose_micro_batch_length(size, budget)) == length for size in sizes)

    def _round_up(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def _make_shape_by_length(self, length: int) -> MicroBatchShape:
        return self._make_shape(self.num_rows, self._round_up(length), 1, self.rank)

    def _make_shape(
        self, num_rows: int, length: int, num_targets: int, rank: int, is_local: bool = True
    ) -> MicroBatchShape:
        return MicroBatchShape(num_rows, length, num_targets, rank, self.remat(num_rows * length), is_local)


class TrainingPrograms:
    """The programs of `forward_backward`, compiled in the background.

    Only the programs of `accumulate` are compiled before a pass needs them.
    """

    def __init__(self, params: models.DecoderParams, config: models.ModelConfig, compiler: Compiler[Any]) -> None:
        """`params` has the shapes of the base weights, with the layout of training.

        `compiler` may compile sampling programs too; their calls are not counted.
        """
        self.ready: dict[MicroBatchShape, CompiledProgram] = compiler.ready
        """The compiled programs."""

        self.layout = params.layout
        self._params, self._config, self._compiler = params, config, compiler
        self._popularity: Popularity | None = None
        self._usual: Sequence[MicroBatchShape] = ()

    def start(self, shapes: MicroBatchShapes, cache_dir: Path | None) -> None:
        """Begin to compile likely programs.

        `cache_dir` has the file of popular programs. None means that no program is popular.
        """
        if cache_dir is not None:
            layout = self._params.layout
            key = (self._config, layout.mesh, self._params.embed.dtype.name)
            name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            self._popularity = Popularity(cache_dir / "popular" / f"{name}.json")

        popular = iter(() if self._popularity is None else self._popularity.read())
        self._usual = list(shapes.iter_usual(popular))
        likely = dict.fromkeys((*self._usual, *shapes.iter_lengths()))
        self._compiler.queue_likely((shape, self._make_program(shape)) for shape in likely)

    def queue_usual(self) -> None:
        """Compile the programs that nearly every server needs before the other likely ones."""
        for shape in self._usual:
            self.queue_needed(shape, None)

    def wait_for_usual(self) -> None:
        """Wait for the programs of `queue_usual`."""
        for shape in self._usual:
            self.wait(shape, threading.TIMEOUT_MAX)

    def queue_needed(self, shape: MicroBatchShape, requester: Hashable) -> None:
        """Compile a program that a pass needs now or soon, before the likely ones.

        `requester` identifies the pass.
        """
        self._compiler.queue_needed(shape, partial(self._make_program, shape), requester)

    def wait(self, shape: MicroBatchShape, timeout_s: float) -> bool:
        """Wait until a needed program is ready, at most `timeout_s` seconds.

        Returns whether it is ready.
        """
        return self._compiler.wait(shape, timeout_s)

    def close(self) -> None:
        """Stop the compiler, and store how often programs were called. Idempotent."""
        self._compiler.close()
        called = {shape: program for shape, program in self.ready.items() if program.num_calls}
        counts = {shape.name: program.num_calls for shape, program in called.items() if shape.remat is not None}
        if counts and self._popularity is not None:
            self._popularity.add(counts)
        self._popularity = None

    def _make_program(self, shape: MicroBatchShape) -> Program:
        adapter = make_adapter_shapes(self._params.layout, self._config, shape.rank)
        batch = packing.make_empty_micro_batch(
            shape.num_rows,
            shape.length,
            shape.num_targets,
            is_local=shape.is_local,
            has_prefixes=shape.has_prefixes,
        )
        if shape.remat is None:
            return Program(forward_backward.forward, (self._params, adapter, batch), {"config": self._config})
        static = {"config": self._config, "remat": shape.remat}
        return Program(forward_backward.accumulate, (self._params, adapter, adapter.weights, batch), static)


def make_param_shapes(
    described: models.DecoderParams, layout: Layout, kernels: Kernels, dtype: np.dtype
) -> models.DecoderParams:
    """Return the shapes of the base weights, with their shardings on a mesh."""

    def make_leaf(_: str, parameter: Parameter) -> Any:
        stored = np.dtype(np.float32) if parameter.is_float32 else dtype
        return jax.ShapeDtypeStruct(parameter.shape, stored, sharding=get_parameter_sharding(layout, parameter))

    return map_named(make_leaf, described).replace(layout=layout, kernels=kernels)


def make_adapter_shapes(layout: Layout, config: models.ModelConfig, rank: int) -> Adapter:
    """Return the shapes of an adapter on a mesh."""

    def make_leaf(leaf: jax.Array, axes: tuple[Any, ...]) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(axes, leaf.shape))

    shapes = models.describe_adapter(config, rank)
    return Adapter(weights=map_factors(make_leaf, config, shapes.weights), scale=make_leaf(shapes.scale, ()))
