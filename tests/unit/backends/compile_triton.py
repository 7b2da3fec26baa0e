"""Compiles the device codec's Triton kernels to machine code, without a GPU: for compute capabilities 8.0 and 9.0, all widths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rose.backends.device_codec import triton_kernels as kernels

INTS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}
NUMBERS = {"num_cells": "i32", "num_blocks": "i32", "num": "i32", "row_len": "i32", "step": "i32"}
WIDE = ("cells", "ends", "reached", "table", "totals", "total_ends")
BYTES = ("gaps", "lows", "codes")
NARROW = ("blocks", "slot_positions", "counts", "positions")


def signature(kernel: Any, width: int, constants: dict[str, Any]) -> dict[str, str]:
    """Return the types of a kernel's parameters for elements of ``width`` bytes."""
    types = dict.fromkeys(WIDE, "*i64") | dict.fromkeys(BYTES, "*u8") | dict.fromkeys(NARROW, "*i32") | NUMBERS
    types |= dict.fromkeys(("slot_new", "slot_old", "escapes", "live", "values"), f"*{INTS[width]}")
    return {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}


def forms(width: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield every kernel and constants with which it is used."""
    for is_plain in (True, False):
        yield kernels.find_changes, {"IS_PLAIN": is_plain, "BLOCK": 4096, "NUM_SLOTS": 512}
    for is_overwrite in (True, False) if width < 4 else (False,):
        shared = {"WIDTH": width, "HAS_NIBBLES": width <= 2 and not is_overwrite, "NUM_SLOTS": 512}
        yield kernels.measure_changes, shared
        yield kernels.emit_changes, {**shared, "IS_OVERWRITE": is_overwrite}
    yield kernels.scatter_rows, {"BLOCK": 1024}


def main() -> None:
    """Compile them all."""
    num = 0
    for capability, widths in ((90, (1, 2, 4, 8)), (80, (2, 4))):
        for width in widths:
            for kernel, constants in forms(width):
                source = ASTSource(fn=kernel, signature=signature(kernel, width, constants), constexprs=constants)
                compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
                assert compiled.asm["cubin"], kernel
                is_vectorised = ".v4.b32" in compiled.asm["ptx"]
                if constants.get("IS_PLAIN"):
                    assert is_vectorised, f"plain cells of width {width} are not read 16 bytes at a time"
                num += 1
    print(f"compiled {num} kernels")  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
