"""A WebSocket, as that of vLLM's /v1/realtime, through each gateway, which waits for the picker."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from tests.e2e.conftest import Stack
from tests.support.kubernetes.kubectl import Kubectl, wait

SERVER = """
apiVersion: v1
kind: Pod
metadata: {{name: realtime, labels: {labels}}}
spec:
  containers:
  - name: realtime
    image: {image}
    imagePullPolicy: IfNotPresent
    command: [python, -c]
    args:
    - |
      from aiohttp import web

      async def realtime(request):
          socket = web.WebSocketResponse()
          await socket.prepare(request)
          await socket.send_json({{"type": "session.created"}})
          async for message in socket:
              await socket.send_json({{"length": len(message.data)}})
          return socket

      async def health(request):
          return web.Response()

      app = web.Application()
      app.router.add_get("/v1/realtime", realtime)
      app.router.add_get("/health", health)
      web.run_app(app, port=8000)
    ports: [{{containerPort: 8000}}]
    readinessProbe: {{httpGet: {{path: /health, port: 8000}}, periodSeconds: 1}}
"""
"""Speaks first, as vLLM does. It is one of the pool's pods; the others answer its path with 404."""


@contextmanager
def realtime(kubectl: Kubectl) -> Iterator[None]:
    """A pod beside those of the pool, until the block ends."""
    template = kubectl.get("deployment", "llm")["spec"]["template"]
    labels = ", ".join(f"{name}: '{value}'" for name, value in template["metadata"]["labels"].items())
    image = kubectl.get("deployment", "warmpath")["spec"]["template"]["spec"]["containers"][0]["image"]
    kubectl("apply", "-f", "-", stdin=SERVER.format(labels=f"{{{labels}}}", image=image))
    try:
        kubectl("wait", "--for=condition=Ready", "--timeout=120s", "pod/realtime", timeout=140)
        yield
    finally:
        kubectl("delete", "pod", "realtime", "--grace-period=1")


async def lengths(url: str, sizes: list[int]) -> list[int] | None:
    """What the server answers to messages of these sizes; None: a pod without WebSockets was picked."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        try:
            socket = await http.ws_connect(f"{url}/v1/realtime")
        except aiohttp.WSServerHandshakeError as error:
            if error.status != 404:
                raise
            return None
        async with socket:
            assert await socket.receive_json() == {"type": "session.created"}
            found = []
            for size in sizes:
                await socket.send_bytes(b"x" * size)
                found.append((await socket.receive_json())["length"])
            return found


def test_a_websocket_goes_both_ways(stack: Stack) -> None:
    sizes = [1, 100_000, 2_000_000]
    with realtime(stack.kubectl), stack.entered() as url:
        wait(lambda: asyncio.run(lengths(url, sizes)) == sizes, "the pod that speaks WebSockets is picked")
