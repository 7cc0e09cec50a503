"""How the process uses memory, set once at start: bodies of some hundred kilobytes come and go by the thousand."""

import ctypes
import gc
import logging

log = logging.getLogger("warmpath")

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed(size: int = 256 << 20) -> bool:
    """Keep up to `size` bytes of freed memory instead of giving it back and fetching it again for the next body.

    As it comes, glibc maps every large block anew, and each 4 KB of it is a page fault. One arena for all threads: what
    grpc's threads allocate, ours frees. Returns whether this C library can do so; only glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("this C library has no mallopt: large requests cost some page faults more")
        return False
    largest = 32 << 20  # glibc takes no more
    return all([mallopt(_ARENA_MAX, 1), mallopt(_TRIM_THRESHOLD, size), mallopt(_MMAP_THRESHOLD, largest)])


def rarely_collect() -> None:
    """Look for cycles seldom, and never among what was imported: a request that ends well leaves none behind.

    With Python's own thresholds the decisions kept for people are walked through again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
