"""Compiles Triton kernels for GPUs that need not be there, and prints what each takes of their shared memory.

Run as a process of its own: where tests run, Triton interprets.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cluster.engine.native.kernels import slots_triton
from cluster.models import fused_triton

_SLOTS = {
    **dict.fromkeys(("query", "key", "value", "out"), ""),
    **dict.fromkeys(("table", "blocks", "rows"), "*i32"),
    "scale": "fp32",
    **{f"{name}_{of}": "i32" for name in ("q", "k", "v", "o") for of in ("first", "second")},
}
_SIZES = {"GROUP": 7, "SIZE": 128, "WIDTH": 128, "WIDE": False}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "slots": (slots_triton._kernel, _SLOTS, {**_SIZES, "ROWS": 128, "KEYS": 64, "PRECISION": "tf32"}),
    "slots, short": (slots_triton._kernel, _SLOTS, {**_SIZES, "ROWS": 64, "KEYS": 64, "PRECISION": "tf32"}),
    "slots, decoding": (slots_triton._kernel, _SLOTS, {**_SIZES, "ROWS": 16, "KEYS": 64, "PRECISION": "tf32"}),
    "gated": (fused_triton._gated, {"x": "", "out": "", "width": "i32", "x_row": "i32"}, {"COLUMNS": 1024}),
    "rotated": (
        fused_triton._rotated,
        {"x": "", "cos": "*fp32", "sin": "*fp32", "out": "", "rows": "i32"}
        | dict.fromkeys(("x_row", "x_head", "cos_row", "sin_row"), "i32"),
        {"HEADS": 32, "HALF": 40, "WIDTH": 64, "ROWS": 16},
    ),
    "float8": (
        fused_triton._float8,
        {"x": "", "out": "*fp8e4nv", "scale": "*fp32", "width": "i32", "x_row": "i32"}
        | dict.fromkeys(("smallest", "largest"), "fp32"),
        {"WIDTH": 4096},
    ),
}


def compile_kernel(name: str, capability: int) -> Any:
    """A kernel for activations in bfloat16; ``capability``: 80 for 8.0."""
    kernel, given, constants = KERNELS[name]
    names = kernel.arg_names
    types = dict(zip(names, [kind or "*bf16" for kind in given.values()], strict=False))
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    # As in production, where addresses and strides are multiples of 16.
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types.get(name, "fp32") != "fp32"}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def compile_kernels(capability: int, names: list[str]) -> dict[str, tuple[int, str]]:
    """Shared memory and PTX of each, or of all."""
    compiled = {name: compile_kernel(name, capability) for name in names or KERNELS}
    return {name: (each.metadata.shared, each.asm["ptx"]) for name, each in compiled.items()}


if __name__ == "__main__":
    # By a GPU's capability, the names of kernels.
    wanted: dict[str, list[str]] = json.loads(sys.argv[1])
    print(json.dumps({capability: compile_kernels(int(capability), names) for capability, names in wanted.items()}))
