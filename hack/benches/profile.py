"""Where the microseconds of one request go, by stage, in the picker's own process, without sockets.

A real server, scheduler and recorder are fed what a gateway sends, as HTTP/2 frames; a profiler says how the time is
shared among the modules, a run without it how much there is. What the kernel, the event loop and TLS take comes on top:
`hack/bench picker` has the whole.
"""

import argparse
import asyncio
import cProfile
import pstats
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection

from epp import protocol
from epp.extproc.http2 import framed
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.server import ExtProcServer, GatewayConnection, Settings
from epp.telemetry.metrics import Metrics
from hack.benches.http2_fuzz import HEADERS
from hack.benches.replicas import Replica
from hack.benches.rig import bodies

ROOT = Path(__file__).parents[2]
ENDPOINTS = 8
STAGES = {
    "HTTP/2": ("epp/extproc/http2.py",),
    "streams and gRPC messages": ("epp/extproc/server.py",),
    "ext_proc messages": ("epp/extproc/",),
    "parsing": ("epp/parsing/", "epp/documents/"),
    "prefix": ("epp/prefix/",),
    "cost and pick": tuple(f"epp/scheduling/{name}.py" for name in ("cost", "decision", "pickers", "speeds")),
    "hooks of plugins, accounts": ("epp/scheduling/", "epp/route.py", "epp/pool/"),
    "records and metrics": ("epp/admin/", "epp/telemetry/"),
}
"""Stage -> beginnings of the paths of its modules; the first that fits counts. The rest is `other`."""
MODES = pb.ProcessingMode


class Transport:
    """What the server writes, kept until it is read."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def set_write_buffer_limits(self, **limits: int) -> None:
        """Nothing is ever held back here."""

    def write(self, data: bytes) -> None:
        self._written.append(bytes(data))

    def read(self) -> bytes:
        data = b"".join(self._written)
        self._written.clear()
        return data


class Gateway:
    """A gateway's end of one connection. `seconds`: what the server's end took."""

    def __init__(
        self, wiring: str, profiler: cProfile.Profile | None = None, pieces: Sequence[bytes] | None = None
    ) -> None:
        """`pieces` of an answer; None: as one."""
        self.seconds = 0.0
        self._pieces = JSON if pieces is None else pieces
        self._chosen = b""
        """The endpoint of the last request that was routed: it serves."""
        self._chance = Random(1)
        self._answers = MODES.FULL_DUPLEX_STREAMED if wiring == "full-duplex" else MODES.NONE
        self._profiler = profiler
        route = Replica(ENDPOINTS, 1, tells=False).router.route
        server = ExtProcServer(route, Metrics(time.monotonic), Settings())
        self._transport = Transport()
        self._server = GatewayConnection(server, processes=True)
        self._server.connection_made(cast(Any, self._transport))
        self._peer = H2Connection(H2Configuration(header_encoding=None))
        self._peer.initiate_connection()
        self._peer.update_settings({4: 1 << 24})  # INITIAL_WINDOW_SIZE
        self._peer.increment_flow_control_window(1 << 30)
        self._exchange()

    def ask(self, body: bytes) -> None:
        """One request and its answer, in the pieces in which they reach a picker."""
        stream = self._peer.get_next_available_stream_id()
        self._peer.send_headers(stream, HEADERS)
        for message in self._messages(body):
            data = framed(message)
            for at in range(0, len(data), 16_384):
                self._peer.send_data(stream, data[at : at + 16_384])
            self._exchange()
        self._peer.end_stream(stream)
        self._exchange()

    def _messages(self, body: bytes) -> Iterator[bytes]:
        """What Envoy 1.40 sends: with all of them metadata, and the end of a body by itself."""
        request_id = f"{self._chance.getrandbits(128):032x}"
        headers = pb.HttpHeaders(headers=_headers({**REQUEST, "x-request-id": request_id}))
        config = pb.ProtocolConfiguration(
            request_body_mode=MODES.FULL_DUPLEX_STREAMED, response_body_mode=self._answers
        )
        yield _message(pb.Metadata(), request_headers=headers, protocol_config=config)
        for at in range(0, len(body), 65_536):
            yield _message(pb.Metadata(), request_body=pb.HttpBody(body=body[at : at + 65_536]))
        yield _message(pb.Metadata(), request_body=END)
        served = _served(self._chosen)
        yield _message(served, response_headers=pb.HttpHeaders(headers=_headers(ANSWER)))
        if self._answers != MODES.NONE:
            for piece in self._pieces:
                yield _message(served, response_body=pb.HttpBody(body=piece))
            yield _message(served, response_body=END)

    def _exchange(self) -> None:
        data = self._peer.data_to_send()
        start = time.perf_counter()
        if self._profiler is not None:
            self._profiler.enable()
        self._server.data_received(data)
        if self._profiler is not None:
            self._profiler.disable()
        self.seconds += time.perf_counter() - start
        said = self._transport.read()
        if found := ADDRESS.search(said):
            self._chosen = found[0]
        self._peer.receive_data(said)


def _message(metadata: pb.Metadata, **parts: Any) -> bytes:
    return pb.ProcessingRequest(metadata_context=metadata, **parts).SerializeToString()


def _headers(values: dict[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=k.encode(), raw_value=v.encode()) for k, v in values.items()])


def _served(address: bytes) -> pb.Metadata:
    fields = [
        pb.Struct.Entry(key=key.encode(), value=pb.Value(string_value=address))
        for key in (protocol.DESTINATION, protocol.SERVED)
    ]
    entry = pb.Metadata.Entry(key=protocol.LB_NAMESPACE.encode(), value=pb.Struct(fields=fields))
    return pb.Metadata(filter_metadata=[entry])


REQUEST: Final = {
    ":authority": "x",
    ":path": bodies.PATHS["chat"],
    ":method": "POST",
    ":scheme": "http",
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "user-agent": "OpenAI/Python 2.0",
    "authorization": "Bearer bench",
    "x-stainless-lang": "python",
    "x-forwarded-proto": "http",
}
ANSWER: Final = {
    ":status": "200",
    "server": "uvicorn",
    "date": "Tue, 24 Nov 2026 07:14:10 GMT",
    "content-type": "application/json",
    "x-envoy-upstream-service-time": "1",
}
JSON: Final = (b'{"choices":[]}' * 20,)
CHUNKS: Final = (b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n',) * 100
ADDRESS: Final = re.compile(rb"\d+\.\d+\.\d+\.\d+:\d+")
END: Final = pb.HttpBody(end_of_stream=True)


async def spent(
    size: int,
    wiring: str,
    count: int,
    profiler: cProfile.Profile | None = None,
    pieces: Sequence[bytes] | None = None,
) -> float:
    """Microseconds a request, after some for warmth."""
    gateway = Gateway(wiring, profiler, pieces)
    asked = [*bodies.bodies(size, count + 50, "chat", 1)]
    for body in asked[:50]:
        gateway.ask(body)
    gateway.seconds = 0.0
    if profiler is not None:
        profiler.clear()
    for body in asked[50:]:
        gateway.ask(body)
    return gateway.seconds / count * 1e6


def shares(profiler: cProfile.Profile) -> dict[str, float]:
    """Stage -> share of the profiled time. What is built in counts for who called it."""
    times: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own, _, callers) in cast(Any, pstats.Stats(profiler)).stats.items():
        if file == "~" and callers:
            for (caller, _, _), (_, _, time_there, _) in callers.items():
                times[stage_of(caller)] += time_there
        else:
            times[stage_of(file)] += own
    total = sum(times.values())
    return {stage: seconds / total for stage, seconds in times.items()}


def stage_of(file: str) -> str:
    """The stage that a module belongs to."""
    path = file.removeprefix(f"{ROOT}/")
    found = (stage for stage, starts in STAGES.items() if path.startswith(starts))
    return next(found, "other")


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[2, 32, 256])
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    columns, totals = [], []
    cases: list[tuple[str, int, str, Sequence[bytes]]] = [
        (f"{wiring} {size} KB", size << 10, wiring, JSON)
        for wiring in ("full-duplex", "lean")
        for size in options.kilobytes
    ]
    cases.append(("full-duplex, 100 chunks", 2 << 10, "full-duplex", CHUNKS))
    for name, size, wiring, pieces in cases:
        profiler = cProfile.Profile()
        asyncio.run(spent(size, wiring, options.requests, profiler, pieces))
        totals.append(min(asyncio.run(spent(size, wiring, options.requests, None, pieces)) for _ in range(3)))
        columns.append((name, shares(profiler)))
    print(f"{'us a request':28}" + "".join(f"{name:>25}" for name, _ in columns))
    for stage in (*STAGES, "other"):
        cells = (found.get(stage, 0.0) * total for (_, found), total in zip(columns, totals, strict=True))
        print(f"{stage:28}" + "".join(f"{cell:25.1f}" for cell in cells))
    print(f"{'all':28}" + "".join(f"{total:25.1f}" for total in totals))


if __name__ == "__main__":
    main()
