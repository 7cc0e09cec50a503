"""What the doctor says: one finding, and whether it is a disease."""

from typing import Final, Literal

import msgspec

Level = Literal["problem", "hint"]

CHECKS: Final = {
    "pods": "the pods that the pool's selector matches are ready, and there are some",
    "route": "an HTTPRoute leads to the pool, and its gateway has taken both up",
    "unreachable": "it answers at all",
    "metrics": "its /metrics has what is read of an engine",
    "model": "it serves the model that is asked for, and all endpoints serve the same",
    "data-parallel": "ranks behind its port are as many as its label says",
    "prefix-caching": "it reuses prefixes: the same prompt twice is a hit",
    "prompt-token-details": "its answers say how many tokens were cached, so predictions can be checked",
    "kv-events": "it publishes KV events",
    "kv-events-endpoint": "its KV events can be connected to",
    "kv-events-silent": "a new prompt's blocks are announced",
    "block-size": "all endpoints, and what their events say, have one block size",
    "hash-algorithm": "all endpoints hash blocks the same way",
    "hash-seed": "all endpoints give the same block the same hash",
    "tokenize": "its /tokenize answers",
    "tokenizer": "it makes the same tokens of a prompt as the other endpoints, and as the files given",
    "lmcache-unreachable": "the LMCache server answers",
    "lmcache-engines": "an engine is registered with it",
    "lmcache-chunk": "its chunk is the engines' block",
    "lmcache-hash": "it hashes as the engines do",
    "lmcache-names": "its chunks have the names by which the picker looks for them",
    "lmcache-transfer": "engines let it read their memory, so it knows which tokens a chunk is",
    "l2-shared": "its L2 is for all nodes",
    "l2-stuck": "what it writes to L2 arrives",
    "coordinator-unset": "it reports to a coordinator",
    "coordinator-unreachable": "the coordinator answers, and knows the servers",
}
"""Check -> what holds where it finds nothing."""


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be."""

    subject: str
    """The endpoint's or server's name."""
    check: str
    """One of `CHECKS`."""
    level: Level
    """problem: requests are picked worse than they could be. hint: something is given away."""
    found: str
    fix: str
    """The flag, as it stands on the command line that is to be changed, or what to do."""

    def __post_init__(self) -> None:
        assert self.check in CHECKS, self.check


def problem(subject: str, check: str, found: str, fix: str) -> Finding:
    return Finding(subject, check, "problem", found, fix)


def hint(subject: str, check: str, found: str, fix: str) -> Finding:
    return Finding(subject, check, "hint", found, fix)
