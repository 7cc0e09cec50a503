import asyncio
from typing import Any

import pytest
from grpc import aio

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb
from hack.benches.rig import bare_server

DESTINATION = "127.0.0.1:8000"


@pytest.mark.parametrize("lean", [False, True])
async def test_the_exchange_of_a_pick(lean: bool) -> None:
    server, port = await bare_server.start(0, DESTINATION)
    body = bytes(range(256)) * 300
    try:
        async with asyncio.timeout(10), aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            process: Any = channel.stream_stream(f"/{protocol.EXT_PROC_SERVICE}/Process")  # type: ignore[call-arg]
            call = process()

            async def say(message: pb.ProcessingRequest) -> None:
                await call.write(message.SerializeToString())

            async def received() -> pb.ProcessingResponse:
                return pb.ProcessingResponse.FromString(await call.read())

            await say(pb.ProcessingRequest(request_headers=pb.HttpHeaders()))
            await say(pb.ProcessingRequest(request_body=pb.HttpBody(body=body)))
            await say(pb.ProcessingRequest(request_body=pb.HttpBody(end_of_stream=True)))
            assert DESTINATION.encode() in (await received()).SerializeToString()
            echoed = b""
            while len(echoed) < len(body):
                echoed += (await received()).request_body.response.body_mutation.streamed_response.body
            assert echoed == body
            await say(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
            assert (await received()).WhichOneof("response") == "response_headers"
            if not lean:
                await say(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"answer", end_of_stream=True)))
                piece = (await received()).response_body.response.body_mutation.streamed_response
                assert (piece.body, piece.end_of_stream) == (b"answer", True)
            await call.done_writing()
            assert not isinstance(await call.read(), bytes)  # the end
    finally:
        await server.stop(0)
