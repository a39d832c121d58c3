"""The text of a compiled program, read: loops and their steps, kernels, and what devices send each other.

XLA writes a program as computations of instructions, one a line. A program runs its entry; loops, branches and calls
name further computations. Numbers here are of one run of the program, in which each branch is the longest one.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute", "reduce-scatter")
_LAUNCHED = "fusion", "custom-call", "copy"
_OPCODES = "|".join((*_COLLECTIVES, *_LAUNCHED, "while", "conditional", "call", "async"))
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?)(?: ([a-z][\w\-]*)\((.*))?$")
_WANTED = re.compile(rf"({_OPCODES})(?:-start)?")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')
_CONSTANT = re.compile(r"constant\((\d+)\)")


@dataclass(frozen=True, slots=True)
class CollectiveCalls:
    """Instructions of one kind that send arrays between devices."""

    calls: int
    bytes: int
    """Bytes of the arrays that each device puts in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramText:
    """The work of one run of a program, by its text."""

    num_loops: int
    """Loops in the text."""
    num_steps: int
    """The number of sequential loop iterations; for nested loops the product."""
    num_open_loops: int
    """Loops whose number of steps depends on data: each counts as one step."""
    num_launches: int
    """Fusions, custom calls and copies of arrays. On a GPU each is a kernel."""
    written_bytes: int
    """Bytes of their results."""
    kernels: Mapping[str, int]
    """Calls of Pallas kernels by their names."""
    collectives: Mapping[str, CollectiveCalls]
    in_layers: Mapping[str, CollectiveCalls]
    """Those in loops over layers, of all layers together."""


def read_program(text: str, layer_steps: Collection[int]) -> ProgramText:
    """Read the text of a program. Loops of any of `layer_steps` steps are those over layers."""
    program = _Computations(text, frozenset(layer_steps))
    work = program.entry()
    return ProgramText(
        num_loops=program.num_loops,
        num_steps=work.steps,
        num_open_loops=work.open_loops,
        num_launches=work.launches,
        written_bytes=work.written,
        kernels=dict(sorted(work.kernels.items())),
        collectives=_count_collectives(work.calls, work.bytes),
        in_layers=_count_collectives(work.layer_calls, work.layer_bytes),
    )


def _count_collectives(calls: Counter[str], size: Counter[str]) -> dict[str, CollectiveCalls]:
    return {kind: CollectiveCalls(number, size[kind]) for kind, number in sorted(calls.items())}


@dataclass(slots=True)
class _Work:
    """The work of one run of a computation."""

    steps: int = 0
    open_loops: int = 0
    launches: int = 0
    written: int = 0
    kernels: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])
    bytes: Counter[str] = field(default_factory=Counter[str])
    layer_calls: Counter[str] = field(default_factory=Counter[str])
    layer_bytes: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: "_Work", times: int = 1) -> None:
        self.steps += times * other.steps
        self.launches += times * other.launches
        self.written += times * other.written
        self.open_loops += other.open_loops
        for name in ("kernels", "calls", "bytes", "layer_calls", "layer_bytes"):
            mine: Counter[str] = getattr(self, name)
            mine.update({key: times * number for key, number in getattr(other, name).items()})


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    rest: str
    """Operands and attributes."""


class _Computations:
    """The computations of a program by name."""

    def __init__(self, text: str, layer_steps: frozenset[int]) -> None:
        self._layer_steps = layer_steps
        self._computations: dict[str, list[_Instruction]] = {}
        self._lines: dict[str, list[str]] = {}
        self._sizes: dict[str, int] = {}
        self._entry = ""
        self.num_loops = 0
        self._read(text)
        self._run = cache(self._compute)

    def _read(self, text: str) -> None:
        current = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = header[2]
                self._computations[current], self._lines[current] = [], []
                if header[1]:
                    self._entry = current
            elif current and (found := _INSTRUCTION.match(line)):
                name, shape, opcode, rest = found.groups()
                self._lines[current].append(line)
                self._sizes[name] = _count_bytes(shape)
                if opcode and (kind := _WANTED.fullmatch(opcode)):
                    self.num_loops += kind[1] == "while"
                    self._computations[current].append(_Instruction(name, kind[1], rest))

    def entry(self) -> _Work:
        return self._run(self._entry)

    def _compute(self, name: str) -> _Work:
        work = _Work()
        for instruction in self._computations.get(name, ()):
            if instruction.opcode in _LAUNCHED:
                work.launches += 1
                work.written += self._sizes[instruction.name]
            if instruction.opcode in _COLLECTIVES:
                operands = _NAME.findall(instruction.rest.split(")", 1)[0])
                work.calls[instruction.opcode] += 1
                work.bytes[instruction.opcode] += sum(self._sizes.get(operand, 0) for operand in operands)
            elif instruction.opcode == "while":
                self._loop(instruction, work)
            elif instruction.opcode == "conditional":
                # Only the branch with the most steps counts.
                names = [
                    name for found in _BRANCHES.findall(instruction.rest) for name in _NAME.findall("".join(found))
                ]
                work.add(max(map(self._run, names), key=lambda branch: (branch.steps, branch.calls.total())))
            elif instruction.opcode == "custom-call" and _KERNEL.search(instruction.rest):
                work.kernels[_get_kernel_name(instruction)] += 1
            elif called := _CALLED.search(instruction.rest):
                inner = self._run(called[1])
                # A fusion is launched as a whole
                work.add(replace(inner, launches=0, written=0) if instruction.opcode == "fusion" else inner)
        return work

    def _loop(self, loop: _Instruction, work: _Work) -> None:
        condition, body = _CONDITION.search(loop.rest), _BODY.search(loop.rest)
        assert condition is not None and body is not None, loop
        known = _TRIPS.search(loop.rest)
        steps = int(known[1]) if known else self._bound(condition[1])
        inner, times = self._run(body[1]), 1 if steps is None else steps
        work.add(inner, times)
        work.steps += times
        work.open_loops += steps is None
        if steps in self._layer_steps:
            work.layer_calls.update({key: times * number for key, number in inner.calls.items()})
            work.layer_bytes.update({key: times * number for key, number in inner.bytes.items()})

    def _bound(self, condition: str) -> int | None:
        """Return the constant that a loop counts up to from 0, as all loops over arrays do; None if it is none."""
        lines = self._lines.get(condition, [])
        if not any("direction=LT" in line for line in lines):
            return None
        constants = [int(found[1]) for line in lines if (found := _CONSTANT.search(line))]
        return constants[0] if len(constants) == 1 else None


def _get_kernel_name(call: _Instruction) -> str:
    operation = _OPERATION.search(call.rest)
    names = operation[1].removesuffix("/pallas_call").split("/") if operation else [call.name]
    return re.sub(r"\.\d+$", "", names[-1])


def _count_bytes(shape: str) -> int:
    """Return the bytes of all arrays of a shape, which may be a tuple."""
    total = 0
    for kind, bits, dims in _ARRAY.findall(shape):
        size = 1 if kind == "pred" else max(int(bits or 0) // 8, 1)
        for dim in dims.split(","):
            size *= int(dim or 1)
        total += size
    return total
