"""Which process wrote something, so that another one can tell later whether it still lives.

A process number alone says little: numbers are given out again, a container counts its own, and a
folder may be read on another host. So three things are kept together: the machine (a kernel since its
start, and a space of process numbers on it), the number, and when that kernel started the process.
All of it is read from /proc; where there is none, the machine is None and nobody can tell.
"""

import hashlib
import os
from pathlib import Path

_PROC = Path("/proc")


def this_machine() -> str | None:
    """A short code for this kernel since its start and this space of process numbers; no host name."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return None
    return hashlib.sha256(f"{boot} {numbers}".encode()).hexdigest()[:16]


def process_start(pid: int) -> int | None:
    """When the kernel started a process, in clock ticks since it started itself.

    None where there is no such process, or one that has ended and that nobody has collected.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold spaces and brackets itself.
    fields = text.rpartition(")")[2].split()
    state, start = fields[0], int(fields[19])
    return None if state in "ZX" else start
