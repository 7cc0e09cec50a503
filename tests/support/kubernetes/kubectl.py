"""kubectl against the cluster that KUBECONFIG names, as a user has it."""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

POLL = 0.2
LOAD = {"steady_load": "gateway/steady_load.py", "cluster_load": "kubernetes/cluster_load.py"}
"""Files of tests/support that the load in a cluster needs, by their key in the ConfigMap."""


def wait(condition: Callable[[], bool], what: str, timeout: float = 240) -> None:
    """Until `condition` holds; AssertionError if that takes longer."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(POLL)


class KubectlFailed(Exception):
    """What kubectl said."""


@dataclass(frozen=True)
class Kubectl:
    namespace: str

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 300) -> str:
        """What it prints. KubectlFailed when it fails."""
        command = ["kubectl", "-n", self.namespace, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise KubectlFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def get(self, *what: str) -> Any:
        return json.loads(self("get", *what, "-o", "json"))

    def pods(self, app: str) -> dict[str, str]:
        """Name -> address of the pods with this label `app` that are ready and do not go."""
        return {
            pod["metadata"]["name"]: pod["status"]["podIP"]
            for pod in self.get("pods", "-l", f"app={app}")["items"]
            if "deletionTimestamp" not in pod["metadata"]
            and {"type": "Ready", "status": "True"}.items() <= _condition(pod, "Ready").items()
        }

    def killed(self, pod: str) -> None:
        """Kill it, as a node that fails does, and return when it is dead: its object goes seconds before it."""
        node = self.get("pod", pod)["spec"]["nodeName"]
        self("delete", "pod", pod, "--force", "--grace-period=0")

        def dead() -> bool:
            running = json.loads(self("get", "--raw", f"/api/v1/nodes/{node}/proxy/runningpods/"))
            return all(each["metadata"]["name"] != pod for each in running["items"])

        wait(dead, f"{pod} is dead")

    def rolled_out(self, *deployments: str, seconds: int = 240) -> None:
        for each in deployments:
            self("rollout", "status", f"--timeout={seconds}s", f"deployment/{each}", timeout=seconds + 20)

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """URL of a local port that leads to this port of a pod or Service."""
        command = ["kubectl", "-n", self.namespace, "port-forward", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout
                line = process.stdout.readline()
                found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
                if not found:
                    raise KubectlFailed(f"{' '.join(command)}: {line}{process.stdout.read()}")
                yield f"http://127.0.0.1:{found[1]}"
            finally:
                process.terminate()


def _condition(pod: Any, kind: str) -> dict[str, str]:
    conditions = pod["status"].get("conditions", ())
    return next((each for each in conditions if each["type"] == kind), {})


class Report(NamedTuple):
    """How the load in the cluster stands."""

    era: int
    answered: dict[str, int]
    pods: dict[int, set[str]]
    lost: list[tuple[str, int, str]]
    """Kind, era in which it began, why."""


@dataclass
class ClusterLoad:
    """Load that a pod of the cluster makes, from entering until leaving; then `report` is the last one."""

    kubectl: Kubectl
    pod: str
    url: str
    report: Report = field(init=False)

    def __enter__(self) -> Self:
        command = ["kubectl", "-n", self.kubectl.namespace, "exec", "-i", self.pod, "--"]
        command += ["python", "-m", "tests.support.kubernetes.cluster_load", self.url]
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, bufsize=1
        )
        return self

    def era(self) -> Report:
        """Begin another era. How things stand."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        return self._read()

    def until_answered(self, times: int, timeout: float = 120) -> Report:
        """Wait until each kind of request was answered that often from now on, in new eras; AssertionError if not."""
        before = self.era().answered
        end = time.monotonic() + timeout
        while True:
            time.sleep(POLL)
            now = self.era()
            if all(now.answered.get(kind, 0) - before.get(kind, 0) >= times for kind in ("plain", "stream", "large")):
                return now
            lost = f"{len(now.lost)} lost, the last: {now.lost[-3:]}"
            assert time.monotonic() < end, f"too few answers: {before} then {now.answered}; {lost}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            assert self._process.stdin
            self._process.stdin.close()
            if kind is None:
                self.report = self._read()
        finally:
            if kind is not None:
                self._process.kill()
            self._process.wait(120)
            assert self._process.stdout
            self._process.stdout.close()
            self._errors.close()

    def _read(self) -> Report:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise KubectlFailed(f"the load ended: {self._errors.read()}")
        content = json.loads(line)
        pods = {int(era): set(names) for era, names in content["pods"].items()}
        return Report(content["era"], content["answered"], pods, [tuple(each) for each in content["lost"]])
