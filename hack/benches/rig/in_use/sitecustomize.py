"""In processes that have this directory in PYTHONPATH: each second, how much of their memory is in use.

Which is less than what they have of the machine: allocators give back whole pages only, each of which one live block
keeps. What is written to a file of the process's number in the directory that the environment variable IN_USE names:
the blocks of up to 512 bytes that Python's own allocator has given out, and the bytes that malloc has (mallinfo2 of
glibc 2.33).
"""

import ctypes
import os
import sys
import threading
import time


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _look(file: str) -> None:
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = _Mallinfo
    while True:
        found = mallinfo()
        with open(f"{file}.new", "w", encoding="ascii") as new:
            new.write(f"{sys.getallocatedblocks()} {found.uordblks + found.hblkhd}\n")
        os.replace(f"{file}.new", file)
        time.sleep(1)


threading.Thread(target=_look, args=(os.path.join(os.environ["IN_USE"], str(os.getpid())),), daemon=True).start()
