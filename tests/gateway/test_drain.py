import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from gateway.drain import BUSY, LEAVE, drain, main
from gateway.envoy import running_envoy


class Admin(ThreadingHTTPServer):
    """As much of Envoy's admin interface as is asked; requests end one each time they are counted."""

    def __init__(self) -> None:
        self.left = 0
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Admin

    def do_POST(self) -> None:
        self.server.asked.append(f"POST {self.path}")
        self._answer(b"OK")

    def do_GET(self) -> None:
        self.server.asked.append("count")
        stats = [{"name": "http.port-8080.downstream_rq_active", "value": self.server.left}, {"histograms": {}}]
        self.server.left -= 1
        self._answer(json.dumps({"stats": stats}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def admin() -> Iterator[Admin]:
    with Admin() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_takes_leave_first_and_waits_until_no_request_is_left(admin: Admin) -> None:
    admin.left = 3
    clock = Clock()
    assert drain(admin.url, 60.0, linger=0.0, clock=clock, sleep=clock.sleep)
    assert admin.asked == [f"POST {LEAVE}", *["count"] * 4]


def test_it_lingers_for_those_who_have_not_received_yet(admin: Admin) -> None:
    clock = Clock()
    assert drain(admin.url, 60.0, linger=5.0, clock=clock, sleep=clock.sleep)
    assert clock.now == 105.0
    assert admin.asked.count("count") == 1


def test_it_gives_up_in_time(admin: Admin) -> None:
    admin.left = 1_000_000
    clock = Clock()
    assert not drain(admin.url, 10.0, clock=clock, sleep=clock.sleep)
    assert clock.now == 110.0


def test_the_command_says_when_there_is_no_envoy() -> None:
    done = CliRunner().invoke(main, ["--admin", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "does not answer" in done.output


@pytest.mark.envoy
async def test_a_real_envoy_understands_what_is_asked() -> None:
    """Its admin interface is a socket here, so the two paths are asked as `drain` does."""
    extensions = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{extensions}.http.router.v3.Router"}
    manager = {
        "@type": f"{extensions}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "port-8080",
        "route_config": {},
        "http_filters": [{"name": "router", "typed_config": router}],
    }
    listener = {
        "name": "port-8080",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    config = {"static_resources": {"listeners": [listener]}}
    async with running_envoy(config) as envoy:
        assert await envoy.admin(LEAVE, method="POST") == "OK\n"
        stats = json.loads(await envoy.admin(BUSY))["stats"]
    assert stats == [{"name": "http.port-8080.downstream_rq_active", "value": 0}]
