"""The bare server: grpc.aio and the message exchange of a pick, with a constant destination and nothing understood.

What it costs is the transport; what `epp` costs beyond it is our own code.
"""

import argparse
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import uvloop
from grpc import aio

from epp import protocol
from epp.extproc import messages

LARGEST = 64 << 20

Process = Callable[[Any, "aio.ServicerContext[bytes, bytes]"], Coroutine[Any, Any, None]]


def echoing(destination: str) -> Process:
    """The handler of one ext_proc stream: FULL_DUPLEX_STREAMED request body; answer body the same, or not sent."""
    routed = messages.routed_headers(destination, {}, frozenset(), None)

    async def process(_: Any, context: "aio.ServicerContext[bytes, bytes]") -> None:
        request: list[bytes] = []
        asked = answered = False
        while isinstance(data := await context.read(), bytes):
            message = messages.decode(data)
            kind = message.WhichOneof("request")
            if kind == "request_body" and not asked:
                request.append(message.request_body.body)
                if message.request_body.end_of_stream:
                    asked = True
                    await context.write(routed)
                    for reply in messages.request_chunks(b"".join(request), end=True):
                        await context.write(reply)
            elif kind == "response_headers":
                await context.write(messages.ANSWER_HEADERS)
            elif kind == "response_body" and not answered:
                answered = message.response_body.end_of_stream
                for reply in messages.answer_chunks(message.response_body.body, end=answered):
                    await context.write(reply)

    return process


async def start(port: int, destination: str) -> tuple[aio.Server, int]:
    """Serve on loopback; returns the server and its port."""
    server = aio.server(
        options=[("grpc.max_receive_message_length", LARGEST), ("grpc.max_send_message_length", LARGEST)]
    )
    handler = grpc.stream_stream_rpc_method_handler(echoing(destination))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(protocol.EXT_PROC_SERVICE, {"Process": handler}),)
    )
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


async def _serve(port: int, destination: str) -> None:
    server, _ = await start(port, destination)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--destination", required=True, help="ip:port every request is sent to")
    flags = parser.parse_args()
    uvloop.run(_serve(flags.port, flags.destination))
