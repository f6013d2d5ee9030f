"""What a compiled kernel is made of: its machine code, read with tools that come with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter

import triton


def read(compiled) -> dict:
    """Of a compiled kernel and its innermost loop with copies in it.

    Returns
    -------
    registers, stack : of a thread, bytes of stack; `shared` : bytes of a program; `warps` of it.
    loop : instructions of the loop, by name. copies : its asynchronous copies, by bits of each.
    waits : in the loop, how many groups of copies may be under way when one is waited for; `groups`
        are begun in a round.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    loop = _copying_loop(code)
    copies = Counter(
        int(re.search(r"\.(\d+)$", each)[1]) if re.search(r"\.(\d+)$", each) else 32
        for each in loop
        if each.startswith("LDGSTS")
    )
    waits, groups = _waits(compiled.asm["ttgir"])
    return {
        "registers": registers, "stack": stack, "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps, "copies": copies, "waits": waits, "groups": groups,
        "loop": Counter(each.split(".")[0] for each in loop),
    }  # fmt: skip


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _copying_loop(code: str) -> list[str]:
    """Instructions, as "LDGSTS.E.BYPASS.128", of the shortest loop that begins copies."""
    labels, instructions, loops = {}, [], []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(.*?);", line):
            instructions.append(found[1].split()[0])
            target = re.search(r"BRA.*\((\.L_x_\d+)\)", found[1])
            if target and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])
    with_copies = [loop for loop in loops if any(each.startswith("LDGSTS") for each in loop)]
    return min(with_copies, key=len, default=[])


def _waits(ttgir: str) -> tuple[list[int], int]:
    """Groups that each wait of the innermost loop with copies allows, and groups begun in it."""
    found: tuple[list[int], int] = [], 0
    open_loops: list[list[str]] = []
    for line in ttgir.splitlines():
        if "scf.for" in line:
            open_loops.append([])
        elif "scf.yield" in line and open_loops:
            body = open_loops.pop()
            groups = sum("async_commit_group" in each for each in body)
            if groups and not found[1]:
                counts = [re.search(r"async_wait.*num = (\d+)", each) for each in body]
                found = [int(count[1]) for count in counts if count], groups
        elif open_loops:
            open_loops[-1].append(line)
    return found
