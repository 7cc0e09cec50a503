"""Pages of `/metrics` as long as vLLM's, for endpoints of benches."""

import re
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tooling.simulator.engine import H100_8B, Engine
from tooling.simulator.metrics import Adapters, Page

VLLM_BYTES: Final = 62_000
"""Of the page that vLLM 0.32 serves for one model and one engine."""
_ANSWERS: Final = re.compile(rb"^(vllm:(?:e2e|inter|request)_[a-z_]+(?:\{.*\})?) 0\.0$", re.MULTILINE)
"""Histograms of answers. Other figures say what waits and how fast the engine is, and have to make sense."""


def page(model: str) -> tuple[bytes, bytes]:
    """A page in two parts: Python's own figures stand before the first, and the engine's end with it."""
    engine = Page(Engine(H100_8B), model, Adapters(), lambda: 0.0).render()
    registry = CollectorRegistry()
    others = b""
    while len(engine) + len(others) < VLLM_BYTES:
        name = f"http_request_duration_{len(others)}_seconds"
        Histogram(name, "Latency.", ["handler"], registry=registry).labels("/v1/chat/completions")
        others = generate_latest(registry)
    return engine, others


def nginx_page(model: str) -> bytes:
    """The same as a template for nginx (ngx_http_ssi_module): an engine at work, whose histograms of answers count one
    more each time that a connection asks.
    """
    engine, others = page(model)
    return _ANSWERS.sub(rb'\1 <!--# echo var="connection_requests" -->', engine) + others
