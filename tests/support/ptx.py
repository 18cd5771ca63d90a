"""Small PTX programs for the tests of the machine that executes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qdsl.analyze.execute import Execution, Options, execute_ptx

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
REGISTERS = (".reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<8>;\n"
             "mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x; mov.u32 %r62, %ntid.x; mad.lo.s32 %r63, %r61, %r62, %r60;\n")
LETTER = {8: "h", 16: "h", 32: "r", 64: "d"}


def entry(body: str, parameters: int = 2, shared: int = 0) -> str:
    """A module with one entry.

    %r60 is the thread in its program, %r61 the program, %r63 the thread in the grid; parameter i, a pointer, is in %d<i>.
    """
    names = ", ".join(f".param .u64 p{place}" for place in range(parameters))
    loads = "".join(f"ld.param.u64 %d{place}, [p{place}]; cvta.to.global.u64 %d{place}, %d{place};\n"
                    for place in range(parameters))
    memory = f".shared .align 128 .b8 memory[{shared}];\n" if shared else ""
    return f"{HEAD}.visible .entry test({names})\n{{\n{REGISTERS}{memory}{loads}{body}\nret;\n}}\n"


def run(body: str, *tensors: torch.Tensor, threads: int = 32, programs: int = 1, shared: int = 0,
        outputs: Sequence[torch.Tensor] = (),
        workspaces: Sequence[torch.Tensor] = (), after: Sequence[torch.Tensor] | None = None,
        options: Options | None = None) -> Execution:
    arguments = [(f"t{place}", tensor) for place, tensor in enumerate(tensors)]
    return execute_ptx(entry(body, len(tensors), shared), arguments, (programs,), threads // 32, 0, outputs=outputs,
                       workspaces=workspaces, after=after, options=options)


def evaluate(instruction: str, widths: Sequence[int], result: int, values: Sequence[NDArray[Any]],
             after: str = "") -> NDArray[Any]:
    """The results of an instruction of registers a, b, c of some widths, which writes d; values: unsigned, one per thread.

    The instruction names registers {d}, {a}, {b}, {c}, {e}.
    """
    count = -(-len(values[0]) // 32) * 32
    tensors = [torch.from_numpy(np.resize(value, count).view(f"i{width // 8}").copy()) for width, value in zip(widths, values,
        strict=True)]
    out = torch.zeros(count, dtype={8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[result])
    pointers = len(tensors) + 1
    body, names = [], {"d": f"%{LETTER[result]}{13 if result < 32 else 50 if result == 32 else 31}"}
    for place, (letter, width) in enumerate(zip("abce", widths, strict=False)):
        names[letter] = f"%{LETTER[width]}{9 + place}" if width < 32 else f"%{LETTER[width]}{20 + place}"
        body.append(f"mul.wide.u32 %d30, %r63, {width // 8}; add.s64 %d30, %d30, %d{place}; "
                    f"ld.global.b{width} {names[letter]}, [%d30];")
    body.append(instruction.format(**names) + after)
    body.append(f"mul.wide.u32 %d30, %r63, {result // 8}; add.s64 %d30, %d30, %d{len(tensors)}; "
                f"st.global.b{result} [%d30], {names['d']};")
    execution = execute_ptx(entry("\n".join(body), pointers), [(f"t{place}", tensor) for place, tensor in enumerate((*tensors,
        out))],
                            (1,), count // 32, 0, outputs=(out,))
    assert execution.findings == ()
    return out.numpy().view(f"u{result // 8}")[:len(values[0])]
