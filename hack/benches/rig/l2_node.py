"""What an LMCache server does with its L2, as a process of the engines' Python.

It is LMCache's own storage manager, with the flags of `lmcache server`. Prompts of a few chunks are looked up, stored
and looked up again, by several threads; a line of JSON on stdout tells what became of each, until stdin ends.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import get_arg_parser, parse_args_to_config
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.storage_manager import StorageManager

CHUNKS: Final = 8
CHUNK: Final = 262144
LAYOUT: Final = MemoryLayoutDesc([torch.Size([CHUNK])], [torch.uint8])
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Told(L2AdapterListener):  # type: ignore[misc]  # of a package that mypy does not see
    """Counts the chunks that are reported as stored: what the coordinator, and so a picker, is told of L2."""

    def __init__(self) -> None:
        self.stored = 0

    def on_l2_keys_stored(self, keys: Any, *more: Any) -> None:
        self.stored += len(keys)

    def on_l2_keys_accessed(self, keys: Any) -> None:
        pass

    def on_l2_keys_deleted(self, keys: Any) -> None:
        pass


class Node:
    """A storage manager and the prompts that it was given."""

    def __init__(self, adapter: str, megabytes: int) -> None:
        flags = ["--l1-size-gb", str(megabytes / 1024), "--eviction-policy", "LRU", "--no-l1-use-lazy"]
        args = get_arg_parser().parse_args([*flags, "--l2-adapter", adapter])
        self.manager = StorageManager(parse_args_to_config(args))
        self.told = Told()
        self.manager.register_l2_listener(self.told)

    def ask(self, prompt: str, limit: float) -> dict[str, Any]:
        """Look a prompt up as a server does for its engine: chunks that came from L1, from L2, and how many were wrong.

        `answered` is False where nothing was known of it after `limit` seconds.
        """
        keys = keys_of(prompt)
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
        begun = time.monotonic()
        handle = self.manager.submit_prefetch_task(spec)
        answered = self.manager.wait_prefetch_status(handle, limit)
        said = {"t": begun, "seconds": time.monotonic() - begun, "answered": answered, "l1": 0, "l2": 0, "wrong": 0}
        result = self.manager.query_prefetch_status(handle) if answered else None
        if result is None:
            return said
        said |= {"l1": result.l1_hit_count, "l2": result.l2_hit_count}
        held = keys[: result.l1_hit_count + result.l2_hit_count]
        if held:
            with self.manager.read_prefetched_results(held, result.l1_owners) as found:
                right = [
                    bytes(memoryview(each.byte_array).cast("B")[:64]) == mark(key)
                    for key, each in zip(held, found or (), strict=False)
                ]
                said["wrong"] = len(held) - sum(right)
            if found is not None:
                self.manager.finish_read_prefetched(held, 1, result.l1_owners)
        return said

    def store(self, prompt: str) -> bool:
        """Give L1 a prompt, which hands it to L2. False where L1 has no room for all of it."""
        reserved = self.manager.reserve_write(keys_of(prompt), LAYOUT)
        for key, each in reserved.items():
            memoryview(each.byte_array).cast("B")[:64] = mark(key)
        self.manager.finish_write(list(reserved))
        return len(reserved) == CHUNKS

    def forget(self, prompt: str) -> None:
        """Have L1 forget it, as far as nobody writes or reads it."""
        self.manager.delete_l1_keys(keys_of(prompt))


def keys_of(prompt: str) -> list[ObjectKey]:
    return [ObjectKey(hashlib.sha256(f"{prompt}/{i}".encode()).digest(), "bench", 0) for i in range(CHUNKS)]


def mark(key: ObjectKey) -> bytes:
    """What a chunk begins with."""
    return bytes(key.chunk_hash) + bytes(32)


def tell(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def asking(node: Node, name: str, options: argparse.Namespace) -> None:
    """New prompts and those stored a moment ago, by turns, for ever."""
    chance, stored = random.Random(name), deque[tuple[float, str]](maxlen=64)
    for number in itertools.count():
        time.sleep(options.every)
        new = f"{options.seed}/{name}/{number}"
        said = node.ask(new, options.limit)
        room = node.store(new)
        tell(kind="new", room=room, **said)
        stored.append((time.monotonic(), new))
        now = time.monotonic()
        if ripe := [each for each in stored if now - 4 < each[0] < now - options.age]:
            at, again = chance.choice(ripe)
            node.forget(again)
            tell(kind="again", stored=at, **node.ask(again, options.limit))


def old(node: Node, options: argparse.Namespace) -> None:
    """Tell of each old prompt what is found of it; store what is not, and tell what is found once L1 forgot it."""
    for number in range(options.old):
        prompt = f"{options.seed}/old/{number}"
        said = node.ask(prompt, options.limit)
        tell(kind="old", **said)
        if said["l2"] < CHUNKS:
            node.store(prompt)
            time.sleep(0.5)
            node.forget(prompt)
            tell(kind="kept", **node.ask(prompt, options.limit))


def watching() -> None:
    """Tell every half second how large the process is."""
    while True:
        status = dict(
            line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
        )
        tell(kind="size", t=time.monotonic(), kilobytes=int(status["VmRSS"].split()[0]), threads=int(status["Threads"]))
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", help="JSON, as of `lmcache server --l2-adapter`")
    parser.add_argument("--megabytes", type=int, default=128, help="of L1")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--old", type=int, default=8, help="prompts that a node before may have stored")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--every", type=float, default=0.15, help="seconds of rest between two prompts of a thread")
    parser.add_argument("--age", type=float, default=1.5, help="seconds until a prompt should have arrived in L2")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds until a prompt is given up")
    options = parser.parse_args()
    begun = time.monotonic()
    node = Node(options.adapter, options.megabytes)
    tell(kind="ready", t=time.monotonic(), seconds=time.monotonic() - begun)
    threading.Thread(target=watching, daemon=True).start()
    old(node, options)
    tell(kind="begin", t=time.monotonic(), told=node.told.stored)
    for number in range(options.threads):
        threading.Thread(target=asking, args=(node, f"t{number}", options), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
