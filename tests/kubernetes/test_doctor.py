"""`warmpath doctor --pool-name`: the endpoints of an InferencePool on a real API server."""

import pytest

from epp.errors import ConfigError
from tests.support.kubernetes.cluster import Cluster
from tooling.doctor.command import DoctorOptions, diagnose
from tooling.laptop.ports import free_ports
from tooling.simulator.publisher import KvEventsConfig
from tooling.simulator.server import SimulatedPod

FREE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")


async def test_a_pool_s_pods_are_examined(cluster: Cluster) -> None:
    [port] = free_ports(1)
    await cluster.create_pool("p", port)
    await cluster.create_pods([("a", "127.1.0.7"), ("b", "127.1.0.8")])
    async with (
        SimulatedPod(host="127.1.0.7", port=port, time_scale=100.0, kv_events=FREE),
        SimulatedPod(host="127.1.0.8", port=port, time_scale=100.0),
    ):
        examined, findings = await diagnose(DoctorOptions(pool_name="p", pool_namespace=cluster.namespace))
    assert sorted(examined) == [f"{cluster.namespace}/a", f"{cluster.namespace}/b"]
    assert [(finding.subject, finding.check) for finding in findings] == [(f"{cluster.namespace}/b", "kv-events")]


async def test_pods_that_are_not_ready_are_named_with_the_reason(cluster: Cluster) -> None:
    await cluster.create_pool("p", 8000)
    await cluster.create_pods([("a", "127.1.0.7")])
    await cluster.set_waiting("a", "ErrImagePull", "rpc error: code = NotFound")
    examined, [finding] = await diagnose(DoctorOptions(pool_name="p", pool_namespace=cluster.namespace))
    assert examined == [finding.subject] == [f"{cluster.namespace}/a"]
    assert (finding.check, finding.found) == ("pods", "ErrImagePull: rpc error: code = NotFound")
    assert finding.fix.startswith("the image's name and tag")


async def test_a_pool_that_is_not_there_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tooling.doctor.command._LOADED", 0.5)
    with pytest.raises(ConfigError, match=r"--pool-name: .*/nowhere was not loaded within 0\.5 s"):
        await diagnose(DoctorOptions(pool_name="nowhere", pool_namespace=cluster.namespace))
