"""Child processes that cannot outlive us."""

import os
import sys
from collections.abc import Sequence

# Runs in a process of its own: a fork hook in ours would also run the fork handlers of gRPC's threads.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL; survives the exec
    "os.getppid() == int(sys.argv[1]) or sys.exit('the parent is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def with_parent(command: Sequence[str]) -> list[str]:
    """`command`, wrapped so that the kernel kills it when the process that starts it dies, however it dies.

    Linux only; elsewhere the command itself, which is then stopped by an orderly end alone.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
