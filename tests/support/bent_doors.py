"""A correct endpoint picker, and doors before it that each bend one thing: what a conformance suite has to notice."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from epp import protocol
from epp.conformance.suite import Result, run
from epp.conformance.target import Options
from epp.errors import BadRequest, NoEndpoint
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.server import Door, Settings
from epp.parsing.body import decode
from epp.parsing.openai import Chat
from epp.parsing.request import RawRequest
from epp.telemetry.metrics import Metrics

import msgspec

ENDPOINTS = ("127.0.0.11:8000", "127.0.0.11:8001", "127.0.0.12:8000", "[::1]:8000")
LOOPBACK = ("127.0.0.1:0",)
HEAVY = {"2.10", "2.11", "4.4", "6.2", "8.3"}
"""Cases of many bytes or streams: left out where they are not the point."""

Request, Reply = pb.ProcessingRequest, pb.ProcessingResponse
