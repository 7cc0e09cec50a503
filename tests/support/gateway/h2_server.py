"""An endpoint that speaks HTTP/2 from the first byte (h2c with prior knowledge), and nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import ProtocolError


@dataclass
class H2Server:
    """Answers each request with its name, the path and the size of the body it got, as JSON."""

    name: str
    port: int = 0
    paths: dict[int, str] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        with suppress(ConnectionError, ProtocolError):
            while data := await reader.read(1 << 16):
                for event in connection.receive_data(data):
                    self._handle(connection, event)
                writer.write(connection.data_to_send())
                await writer.drain()
        writer.close()

    def _handle(self, connection: H2Connection, event: object) -> None:
        if isinstance(event, RequestReceived):
            self.paths[event.stream_id] = next(value for name, value in event.headers if name == b":path").decode()
            self.sizes[event.stream_id] = 0
        elif isinstance(event, DataReceived):
            self.sizes[event.stream_id] += len(event.data)
            connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            id = event.stream_id
            said = {"name": self.name, "path": self.paths.pop(id), "size": self.sizes.pop(id), "http": 2}
            connection.send_headers(id, [(":status", "200"), ("content-type", "application/json")])
            connection.send_data(id, json.dumps(said).encode(), end_stream=True)


@asynccontextmanager
async def h2_server(name: str) -> AsyncIterator[H2Server]:
    made = H2Server(name)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
