"""Streams with something wrong in them, seeded."""

import json
import random

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb
from tests.support.ext_proc.messages import (
    DUPLEX,
    HEADERS,
    answer_body,
    answer_headers,
    answer_trailers,
    metadata,
    modes,
    request_body,
    request_headers,
    request_trailers,
)  # fmt: skip
from tests.support.ext_proc.scripts import SCRIPTS


def nested(depth: int) -> pb.Value:
    value = pb.Value(string_value=b"10.0.0.1:8000")
    for _ in range(depth):
        value = pb.Value(list_value=pb.ListValue(values=[value]))
    return value


DEEP = b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
GIANT = json.dumps({"model": "m", "prompt": "x" * 150_000}).encode()
ODD_HEADERS: dict[str, str | bytes] = {**HEADERS, "x-odd": b"\xff\xfe\x00\xc3(", "é": b"\x80" * 300}
HOSTILE = [
    [
        request_headers(ODD_HEADERS),
        request_body(DEEP, end=True),
        answer_headers({":status": b"\xff"}),
        answer_body(b""),
    ],
    [
        request_headers(config=modes(2, 2)),
        request_body(GIANT),
        request_trailers(),
        answer_headers(),
        answer_body(GIANT),
    ],
    [
        request_headers(context=metadata(protocol.SUBSET_NAMESPACE, protocol.SUBSET, nested(d)), end=True)
        for d in (1, 40)
    ],
    [pb.ProcessingRequest(request_headers=pb.HttpHeaders(), protocol_config=DUPLEX).SerializeToString()],
    [pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString(), answer_trailers()],
    [request_headers(), *[request_body(b"")] * 30, *[request_body(GIANT)] * 3],
]
CORPUS = [[message for message, _ in script.steps] for script in SCRIPTS if script.routes] + HOSTILE
MESSAGES = [message for script in SCRIPTS for message, _ in script.steps]


def mutated(rnd: random.Random) -> list[bytes]:
    """A stream of the corpus with a few things wrong."""
    stream = list(rnd.choice(CORPUS))
    for _ in range(rnd.choice((1, 1, 1, 2, 3))):
        at = max(rnd.randrange(len(stream)), rnd.randrange(len(stream))) if stream else 0  # rather late than early
        match rnd.randrange(8):
            case 0:
                del stream[at:]
            case 1:
                stream[at : at + 1] = []
            case 2:
                stream[at:at] = stream[at : at + 1] * rnd.randint(1, 3)
            case 3:
                rnd.shuffle(stream)
            case 4:
                stream.insert(at, rnd.choice(MESSAGES))
            case 5:
                stream.insert(at, rnd.randbytes(rnd.randint(0, 60)))
            case 6 if stream:
                stream[at] = stream[at][: rnd.randrange(len(stream[at]) + 1)]
            case 7 if stream and stream[at]:
                stream[at] = flipped(stream[at], rnd)
    return stream


def flipped(message: bytes, rnd: random.Random) -> bytes:
    changed = bytearray(message)
    for _ in range(rnd.randint(1, 8)):
        changed[rnd.randrange(min(len(changed), 200))] ^= 1 << rnd.randrange(8)
    return bytes(changed)
