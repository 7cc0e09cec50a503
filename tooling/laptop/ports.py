"""Free ports on loopback."""

import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the range systems take outgoing connections' ports from: those come and go and would collide."""


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
    """`count` different ports on which nothing listens now. OSError if there are not that many."""
    found: list[int] = []
    for port in random.sample(range(LOWEST, HIGHEST), HIGHEST - LOWEST):
        if len(found) == count:
            return found
        if is_free(port, host):
            found.append(port)
    raise OSError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {host}")
