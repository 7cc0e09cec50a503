import asyncio

from hack.benches.rig import upstream


async def test_every_request_of_a_connection_is_streamed_to_its_end() -> None:
    server = await upstream.start(0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10):
        for _ in range(2):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\ncontent-length: 16\r\n\r\n{")
            await writer.drain()
            writer.write(b'"stream": true}')
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.count(b"data: {") == upstream.CHUNKS
            assert b"data: [DONE]\n\n" in answer
    writer.close()
    server.close()
    await server.wait_closed()


async def test_what_asks_for_no_stream_is_answered_in_one_piece() -> None:
    server = await upstream.start(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    async with asyncio.timeout(10):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\ncontent-length: 17\r\n\r\n" + b'{"stream": false}')
        assert await reader.readexactly(len(upstream.PLAIN)) == upstream.PLAIN
    writer.close()
    server.close()
    await server.wait_closed()
