"""What one run of a compiled program costs, read from its text: XLA's own cost analysis counts a loop's body once.

Costs are of one device. FLOPs are those of matrix products (two a multiplication and addition), as is usual in
model-FLOPs utilisation. Bytes are what instructions read from and write to main memory; arrays that the compiler keeps
in faster memory count nothing, and of an array that is sliced or updated in place, only the slice does. Of a
conditional the dearest branch counts: the cost is an upper bound. Pallas kernels count nothing: what they do does not
stand in the text (pallas_kernels/traffic.py counts it). Bytes sent are what a device gives to others in
collectives that run as rings: of an all-reduce over n devices, 2 (n − 1) / n of the array.
"""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CONTINUED = re.compile(r'\n(?="|\}\})')  # a kernel's metadata has lines of its own
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')

# Collective -> bytes that one of n devices sends, over those of its operands.
_SENT = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}

# These move nothing: they name, group or order what is there, or what they move is counted inside or at their end.
_FREE = set(
    "parameter tuple get-tuple-element bitcast constant after-all opt-barrier while conditional call partition-id"
    " replica-id async-start async-update async-done copy-done all-gather-done all-reduce-done send-done recv-done"
    " collective-permute-done iota".split()
)


# These leave most of their first operand alone.
_PARTLY = {"dynamic-slice", "gather", "dynamic-update-slice"}


class Cost(NamedTuple):
    """FLOPs, bytes of main memory, and bytes sent to other devices."""

    flops: float
    bytes: float
    sent: float = 0

    def __add__(self, other):
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, n: int) -> "Cost":
        return Cost(*(n * a for a in self))


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    text: str  # operands as written, and attributes
    root: bool


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """(computations as {name: {instruction's name: instruction}}, the entry's name) of a compiled program's text."""
    computations, entry, current = {}, "", {}
    for line in _CONTINUED.sub(" ", text).splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = found.groups()
            current[name] = Instruction(name, shape, opcode, _NAME.findall(_operands(rest)), rest, bool(root))
    return computations, entry


def _operands(rest: str) -> str:
    """What stands before the parenthesis that closes the operands."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:i]
    return rest


def arrays(shape: str) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """(dimensions, bytes, whether in main memory) of every array of a shape, which may be a tuple's."""
    for dtype, dims, layout in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or [0])[0])
        dims = tuple(int(d) for d in dims.split(",") if d)
        yield dims, math.prod(dims) * bits // 8, "S(" not in layout


def moved(shape: str) -> int:
    """Bytes of a shape's arrays in main memory."""
    return sum(size for _, size, main in arrays(shape) if main)


def program_cost(text: str) -> Cost:
    """The cost of one run. Raises ValueError for a loop whose trips cannot be told."""
    computations, entry = parse(text)

    @cache
    def of(computation: str) -> Cost:
        return sum((of_one(i, computations[computation]) for i in computations[computation].values()), Cost(0, 0))

    def of_one(i: Instruction, beside: dict[str, Instruction]) -> Cost:
        called = _called(i)
        if i.opcode == "while":
            return (of(called["body"][0]) + of(called["condition"][0])).times(_trips(i, computations, beside))
        if i.opcode == "conditional":
            return max((of(branch) for branch in called["branches"]), key=lambda cost: cost.flops)
        if i.opcode == "fusion":
            (name,) = called["calls"]
            sent = of(name).sent * _share_of_fusion(i, name)
            return Cost(of(name).flops, _fusion_bytes(i, computations[name], beside), sent)
        if i.opcode in ("call", "async-start"):
            return of((called.get("calls") or called["to_apply"])[0])
        return Cost(_flops(i, beside), _bytes(i, beside), _sent(i, beside))

    return of(entry)


def kernels_vmem(text: str) -> int:
    """Bytes of fast memory that the compiler gave the largest Pallas kernel of a program for TPUs; 0 without one."""
    kernels = (i for computation in parse(text)[0].values() for i in computation.values() if _is_kernel(i))
    return max((int(size) for kernel in kernels for size in _VMEM.findall(kernel.text)), default=0)


def bytes_moved(compiled) -> float:
    """What a jitted function's compiled program moves beside its kernels, by XLA's own analysis or, where there are
    loops, by `program_cost`."""
    text = compiled.as_text()
    return program_cost(text).bytes if " while(" in text else (compiled.cost_analysis() or {}).get("bytes accessed", 0)


def _is_kernel(i: Instruction) -> bool:
    return 'custom_call_target="tpu_custom_call"' in i.text


def _called(i: Instruction) -> dict[str, list[str]]:
    """The computations that an instruction runs, by role."""
    roles = {role: [name] for role, name in re.findall(r"(calls|to_apply|body|condition)=%?([\w.\-]+)", i.text)}
    branches = re.search(r"branch_computations=\{([^}]*)\}", i.text)
    named = branches[1] if branches else " ".join(re.findall(r"(?:true|false)_computation=(%?[\w.\-]+)", i.text))
    return {**roles, "branches": _NAME.findall(named)}


def _trips(loop: Instruction, computations: dict, beside: dict[str, Instruction]) -> int:
    """How often a loop runs: as annotated, or the bound that its counter, which begins at 0, is compared with."""
    if annotated := _TRIPS.search(loop.text):
        return int(annotated[1])
    condition = computations[_called(loop)["condition"][0]]
    bounds = [_integer(i) for i in condition.values() if i.opcode == "constant" and re.match(r"[su]\d+\[\]", i.shape)]
    if len(bounds) != 1:
        raise ValueError(f"loop {loop.name}: its condition has {len(bounds)} constants, so its trips are unknown")
    return bounds[0]


def _integer(constant: Instruction) -> int:
    return int(re.match(r"-?\d+", constant.text)[0])


def _flops(i: Instruction, beside: dict[str, Instruction]) -> float:
    """Of one instruction outside of what it calls: matrix products."""
    if i.opcode not in ("dot", "convolution"):
        return 0.0
    left, right = (next(arrays(beside[name].shape))[0] for name in i.operands[:2])
    out = next(arrays(i.shape))[0]
    if i.opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.text)[1]
        return 2.0 * math.prod(out) * math.prod(left[int(d)] for d in dims.split(",") if d)
    return 2.0 * _convolution_products(i, left, right, out)


def _convolution_products(i: Instruction, left, right, out) -> float:
    """Multiplications of a convolution, those with padding and between dilated inputs left out.

    XLA writes matrix products for TPUs as convolutions whose windows are mostly padding.
    """
    on_left, on_right, on_out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.text).groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", i.text) or ["", ""])[1]))
    groups = math.prod(int(n) for n in re.findall(r"(?:feature|batch)_group_count=(\d+)", i.text))
    products = out[on_out.index("b")] * out[on_out.index("f")] * right[on_right.index("i")]

    def field(name, axis, default):
        return window[name].split("x")[axis] if name in window else default

    for axis in range(sum(label.isdigit() for label in on_left)):
        label = str(axis)
        before = int(field("pad", axis, "0_0").split("_")[0])
        stride, spread, dilated = (int(field(n, axis, "1")) for n in ("stride", "rhs_dilate", "lhs_dilate"))
        at = np.arange(out[on_out.index(label)])[:, None] * stride - before
        at = at + np.arange(right[on_right.index(label)]) * spread
        products *= int(((at % dilated == 0) & (at >= 0) & (at // dilated < left[on_left.index(label)])).sum())
    return products / groups


def _sent(i: Instruction, beside: dict[str, Instruction]) -> float:
    """Bytes sent by a collective."""
    share = _SENT.get(i.opcode.removesuffix("-start"))
    if share is None:
        return 0
    return share(_group(i.text)) * sum(size for name in i.operands for _, size, _ in arrays(beside[name].shape))


def _group(text: str) -> int:
    """How many devices take part in a collective together; its groups are listed, counted, or axes of a mesh."""
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(axis.split("=") for axis in axes[1].split(","))
        return math.prod(int(sizes[axis]) for axis in axes[2].split(","))
    found = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", text)
    return 1 if found is None else int(found[1] or len(found[2].split(",")))


def _share_of_fusion(i: Instruction, called: str) -> float:
    """How much of the collectives in a fusion counts, by the names that XLA gives on TPUs.

    One that runs beside other work is written in its start, in the fusions that go on meanwhile, and in its end, where
    it counts; an all-reduce of which the device keeps its own part is a reduce-scatter, half of it.
    """
    if i.name.startswith("async-collective-start") or called.startswith("async_collective_fusion"):
        return 0
    return 0.5 if called.startswith("all-reduce-scatter") else 1


def _bytes(i: Instruction, beside: dict[str, Instruction]) -> int:
    """Read and written by one instruction that is no fusion."""
    if i.opcode in _FREE or _is_kernel(i):
        return 0
    if i.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * moved(i.shape)
    if i.opcode == "dynamic-update-slice":
        return 2 * moved(beside[i.operands[1]].shape)
    read = sum(moved(beside[name].shape) for name in i.operands)
    # The result of a copy that was started names its source, too.
    return read + (moved(beside[i.operands[0]].shape) if i.opcode == "copy-start" else moved(i.shape))


def _fusion_bytes(i: Instruction, inside: dict[str, Instruction], beside: dict[str, Instruction]) -> int:
    """Read and written by a fusion."""
    parameters = {int(re.match(r"\d+", p.text)[0]): p for p in inside.values() if p.opcode == "parameter"}
    total = 0
    for position, operand in enumerate(i.operands):
        full = moved(beside[operand].shape)
        name = parameters[position].name
        users = [user for user in inside.values() if name in user.operands]
        if users and all(user.opcode in _PARTLY and user.operands[0] == name for user in users):
            read = (user for user in users if user.opcode != "dynamic-update-slice")  # that one writes in place
            full = min(full, sum(next(arrays(user.shape))[1] for user in read))
        total += full
    root = next(one for one in inside.values() if one.root)
    outputs = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    results = list(arrays(i.shape))
    if len(outputs) != len(results):  # one instruction makes several
        return total + moved(i.shape)
    for out, (_, size, main) in zip(outputs, results, strict=True):
        if out.opcode == "bitcast":
            out = inside[out.operands[0]]
        if out.opcode == "dynamic-update-slice":
            size = next(arrays(inside[out.operands[1]].shape))[1]
        total += size * main
    return total
