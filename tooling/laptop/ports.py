"""Free ports on loopback."""

import fcntl
import os
import random
import socket
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from typing import Final

LOWEST, HIGHEST = 20_000, 32_000
"""Below the range systems take outgoing connections' ports from: those come and go and would collide."""
_KEPT: Final = 1000
"""Ports that a process keeps for whom it gave them to at most: those given last."""
_mine: Final = deque[int]()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server can listen on `host:port` now. PermissionError where only root may."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            raise
        except OSError:
            return False
        return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports on which nothing listens now, and which nobody else, in this process or another of this
    user's, was given here and may be about to listen on. OSError if there are not that many.
    """
    found: list[int] = []
    for port in random.sample(range(LOWEST, HIGHEST), HIGHEST - LOWEST):
        if len(found) == count:
            return found
        if is_free(port, host) and _taken(port):
            found.append(port)
    raise OSError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {host}")


def this_or_free(port: int) -> int:
    """`port`, if it can be had as `free_ports` gives them; else one of those."""
    return port if is_free(port) and _taken(port) else free_ports(1)[0]


def _taken(port: int) -> bool:
    """Whether the port is the caller's now: the process has locked the byte at that place of a file, until it ends.
    The lock keeps other processes away, not this one, to which the same byte would be given again.
    """
    if port in _mine:
        return False
    file = _file()
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _mine.append(port)
    while len(_mine) > _KEPT:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _mine.popleft())
    return True


@cache
def _file() -> int:
    path = Path(tempfile.gettempdir()) / f"warmpath-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
