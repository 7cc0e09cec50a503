"""What tests do in a namespace of a real API server."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from epp.pool.apiserver import ApiServer
from epp.pool.kubernetes import KubePools
from tests.support.kubernetes.control_plane import ControlPlane

POOL_GROUP = "apis/inference.networking.k8s.io/v1"
LLMD_GROUP = "apis/llm-d.ai/v1alpha2"
LEGACY_GROUP = "apis/inference.networking.x-k8s.io/v1alpha2"


class Cluster:
    """One namespace, as the administrator sees it. Pods have no kubelet: they are what their status says."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace

    async def create(self, group: str, plural: str, name: str, spec: Any) -> None:
        kinds = {"inferencepools": "InferencePool", "inferenceobjectives": "InferenceObjective"}
        body = {
            "apiVersion": group.removeprefix("apis/"),
            "kind": kinds.get(plural, "InferenceModelRewrite"),
            "metadata": {"name": name},
            "spec": spec,
        }
        await self._call("POST", self._path(group, plural), body)

    async def patch(self, group: str, plural: str, name: str, change: Any) -> None:
        await self._call("PATCH", f"{self._path(group, plural)}/{name}", change)

    async def delete(self, group: str, plural: str, name: str) -> None:
        await self._call("DELETE", f"{self._path(group, plural)}/{name}")

    async def create_pool(self, name: str, *ports: int, labels: dict[str, str] | None = None) -> None:
        spec = {
            "selector": {"matchLabels": labels or {"app": "x"}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        }
        await self.create(POOL_GROUP, "inferencepools", name, spec)

    async def create_pods(self, pods: Iterable[tuple[str, str]], **metadata: Any) -> None:
        """(name, ip) of each, ready at once."""
        await self._many([lambda name=name, ip=ip: self._create_pod(name, ip, metadata) for name, ip in pods])

    async def delete_pods(self, names: Iterable[str], grace: int = 0) -> None:
        """With a grace period they stay, going away, as no kubelet reports their end."""
        path = self._path("api/v1", "pods")
        body = {"gracePeriodSeconds": grace}
        await self._many([lambda name=name: self.plane.call("DELETE", f"{path}/{name}", body) for name in names])

    async def set_ready(self, name: str, ready: bool) -> None:
        await asyncio.to_thread(self._set_status, name, {"conditions": [{"type": "Ready", "status": str(ready)}]})

    async def set_waiting(self, name: str, reason: str, message: str) -> None:
        """As the kubelet says it of a container that cannot start."""
        container: dict[str, Any] = {"name": "vllm", "image": "none", "imageID": "", "ready": False, "restartCount": 0}
        container["state"] = {"waiting": {"reason": reason, "message": message}}
        conditions = [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}]
        status = {"phase": "Pending", "conditions": conditions, "containerStatuses": [container]}
        await asyncio.to_thread(self._set_status, name, status)

    async def annotate(self, name: str, **annotations: str | None) -> None:
        await self.patch("api/v1", "pods", name, {"metadata": {"annotations": annotations}})

    def _create_pod(self, name: str, ip: str, metadata: dict[str, Any]) -> None:
        body = {
            "metadata": {"name": name, "labels": {"app": "x"}, **metadata},
            "spec": {"nodeName": "none", "containers": [{"name": "vllm", "image": "none"}]},
        }
        self.plane.call("POST", self._path("api/v1", "pods"), body)
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
        self._set_status(name, status)

    def _set_status(self, name: str, status: Any) -> None:
        self.plane.call("PATCH", f"{self._path('api/v1', 'pods')}/{name}/status", {"status": status})

    def _path(self, group: str, plural: str) -> str:
        return f"/{group}/namespaces/{self.namespace}/{plural}"

    async def _call(self, method: str, path: str, body: Any = None) -> None:
        await asyncio.to_thread(self.plane.call, method, path, body)

    async def _many(self, calls: list[Any]) -> None:
        def run() -> None:
            with ThreadPoolExecutor(8) as threads:
                for done in [threads.submit(call) for call in calls]:
                    done.result()

        await asyncio.to_thread(run)


@asynccontextmanager
async def followed(pools: KubePools) -> AsyncIterator[KubePools]:
    """The pools while they are watched; then their connections are closed."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(pools.watch())
            try:
                yield pools
            finally:
                task.cancel()
    finally:
        if isinstance(pools._source, ApiServer):
            await pools._source.close()
