import json
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from gateway.envoy import running_envoy, validate
from gateway.load import Resources, load
from gateway.sidecar import main, sidecar
from tests.support.ext_proc.server import Route, ext_proc_server
from tests.support.gateway.rig import upstream
from tooling.laptop.ports import free_ports

GATEWAY = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: g}
spec: {gatewayClassName: c, listeners: [{name: http, port: 8080, protocol: HTTP}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{name: g}]
  rules: [{backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: models}]}]
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: models}
spec:
  selector: {matchLabels: {app: x}}
  targetPorts: [{number: 8000}, {number: 8001}]
  endpointPickerRef: {name: epp, port: {number: 9102}}
"""


@pytest.fixture
def resources(tmp_path: Path) -> Resources:
    (tmp_path / "all.yaml").write_text(GATEWAY)
    return load([tmp_path / "all.yaml"])


def test_endpoints_are_asked_of_dns_on_each_port_and_the_pickers_word_decides(resources: Resources) -> None:
    pool, picker = sidecar(resources)["static_resources"]["clusters"]
    assert (pool["name"], pool["type"]) == ("pool.default.models", "STRICT_DNS")
    (locality,) = pool["load_assignment"]["endpoints"]
    places = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
    assert places == [{"address": "models", "port_value": 8000}, {"address": "models", "port_value": 8001}]
    assert "override_host" in pool["load_balancing_policy"]["policies"][0]["typed_extension_config"]["name"]
    (endpoints,) = picker["load_assignment"]["endpoints"]
    address = endpoints["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert (picker["type"], address) == ("STATIC", {"address": "127.0.0.1", "port_value": 9102})


def test_clients_reach_it_from_outside_and_nobody_its_admin_interface(resources: Resources) -> None:
    bootstrap = sidecar(resources)
    (listener,) = bootstrap["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 8080}
    assert bootstrap["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


@pytest.mark.envoy
async def test_envoy_takes_it(resources: Resources) -> None:
    assert await validate(sidecar(resources)) is None


@pytest.mark.envoy
async def test_a_real_envoy_asks_dns_and_follows_the_pickers_word(tmp_path: Path) -> None:
    picker = Route()
    async with (
        upstream("a") as a,
        upstream("b") as b,
        ext_proc_server(picker) as picking,
        aiohttp.ClientSession() as session,
    ):
        ports = [f"{{number: {each.address.rpartition(':')[2]}}}" for each in (a, b)]
        [port] = free_ports(1)
        text = GATEWAY.replace("{number: 8000}, {number: 8001}", ", ".join(ports)).replace("models", "localhost")
        text = text.replace("number: 9102", f"number: {picking.ports[0]}").replace("port: 8080", f"port: {port}")
        (tmp_path / "all.yaml").write_text(text)
        bootstrap = sidecar(load([tmp_path / "all.yaml"]))
        bootstrap["static_resources"]["listeners"][0]["address"]["socket_address"]["address"] = "127.0.0.1"
        async with running_envoy(bootstrap, directory=tmp_path / "envoy"):
            for wanted in (a, b, b, a):
                picker.destination = wanted.address
                async with session.post(f"http://127.0.0.1:{port}/", json={"model": "m", "prompt": "p"}) as answer:
                    assert (answer.status, answer.headers.get("x-pod")) == (200, wanted.name), await answer.text()
            picker.destination = f"127.0.0.1:1,{b.address}"
            async with session.post(f"http://127.0.0.1:{port}/", json={"model": "m", "prompt": "p"}) as answer:
                assert answer.headers["x-pod"] == "b", "one that DNS does not have is passed over"


def test_the_command_prints_it(resources: Resources, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [str(tmp_path / "all.yaml")])
    assert json.loads(done.output) == sidecar(resources)
