import asyncio
from contextlib import suppress

from hack.benches.rig.real_pool import Connections


async def test_connections_lead_to_their_target_until_they_are_cut() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(100):
                writer.write(piece)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as target:
        connections = Connections(target.sockets[0].getsockname()[1])
        async with connections.listening():
            reader, writer = await asyncio.open_connection("127.0.0.1", connections.port)
            writer.write(b"a line\n")
            assert await reader.readline() == b"a line\n"
            connections.cut()
            assert await reader.read() == b""
            again, second = await asyncio.open_connection("127.0.0.1", connections.port)
            second.write(b"another\n")
            assert await again.readline() == b"another\n"
            for each in (writer, second):
                each.transport.abort()
