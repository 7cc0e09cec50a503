"""A port where connecting gets no answer, as where a NetworkPolicy drops packets."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress


@contextmanager
def dropping() -> Iterator[int]:
    """The port. Linux drops what comes to a socket whose queue of connections is full."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(socket.socket()))
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            client = stack.enter_context(closing(socket.socket()))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield server.getsockname()[1]
