"""The overlay `tiered-kv` on CPUs: pods with real vLLM, LMCache on the node, its coordinator, a volume, and kv-aware.

`hack/kind-up --engine` makes a cluster for it; hack/kind/tiered-kv says what is not as shipped.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import ROOT, Admin, Stack, gateway_of, put_into
from tests.e2e.test_kv_events import all_live
from tests.support.engines.lmcache import tokens_found
from tests.support.engines.talk import Turn
from tests.support.gateway.chain import PATIENT
from tests.support.kubernetes.kubectl import Kubectl, wait

NAMESPACE = "warmpath-e2e-tiered-kv"
BLOCK = 64
DEVICE = 128 * BLOCK
"""Tokens, as hack/kind/tiered-kv has it."""
START = 900
"""Seconds in which vLLM starts on a machine that has other things to do."""


@pytest.fixture(scope="module")
def tiered(kind: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The overlay in a namespace of its own."""
    images = [image for node in Kubectl("default").get("nodes")["items"] for image in node["status"]["images"]]
    if not any("warmpath-engine:" in name for image in images for name in image["names"]):
        pytest.skip("this cluster has no vLLM: `hack/kind-up --engine` makes one that has")
    kubectl = put_into(NAMESPACE, ROOT / "hack" / "kind" / "tiered-kv", tmp_path_factory.mktemp("tiered"))
    try:
        kubectl("rollout", "status", f"--timeout={START}s", "daemonset/lmcache", timeout=START)
        kubectl.rolled_out("lmcache-coordinator", "warmpath", "llm", seconds=START)
        kubectl("wait", "--timeout=180s", "--for=condition=Programmed", "gateway/inference")
        stack = Stack(kubectl, gateway_of(NAMESPACE), kind.token)
        with stack.with_arguments(*PATIENT):
            yield stack
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")
        kubectl("delete", "persistentvolume", "warmpath-l2", "--wait=false")  # nobody else's claim gets it


@dataclass
class Talk:
    """Messages pile up; each `say` sends them all."""

    client: OpenAI
    admin: Admin
    messages: list[Any]

    def say(self, text: str) -> Turn:
        self.messages.append({"role": "user", "content": text})
        reported = self.client.chat.completions.create(
            model="tiny", messages=self.messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        self.messages.append({"role": "assistant", "content": reported.choices[0].message.content})
        return Turn.of(reported.choices[0].message.content or "", reported.usage, self.admin.last_decision())


@dataclass(frozen=True)
class Tiers:
    """What stands behind the engines, asked directly."""

    stack: Stack
    admin: Admin

    def known(self) -> tuple[float, float]:
        """Whether the picker reaches the coordinator, and how many chunks it knows by it."""
        found = {each.labels["statistic"]: each.value for each in self.admin.samples("warmpath_plugin_statistic")}
        return found["tier_reached"], found["tier_chunks"]

    def chunks(self) -> int:
        """How many the coordinator has."""
        with self.stack.kubectl.forwarded("service/lmcache-coordinator", 9300) as url:
            count: int = json.loads(get(f"{url}/directory/stats"))["num_keys"]
            return count

    def settled(self) -> None:
        """Return when what the pods reported has reached the picker."""

        def same() -> bool:
            before = self.chunks()
            time.sleep(2.5)  # LMCache reports, and the picker reads, once a second
            return before == self.chunks() == self.known()[1]

        wait(same, "the picker knows what the coordinator knows")

    def loaded(self) -> dict[str, float]:
        """Tokens that the node's LMCache has found so far, by tier."""
        (server,) = self.stack.kubectl.pods("lmcache")
        with self.stack.kubectl.forwarded(f"pod/{server}", 8080) as url:
            return tokens_found(get(f"{url}/metrics"))

    def forget_l1(self) -> None:
        (server,) = self.stack.kubectl.pods("lmcache")
        with self.stack.kubectl.forwarded(f"pod/{server}", 8080) as url:
            post(f"{url}/cache/clear", {})

    def fill(self, pod: str) -> None:
        """Have a pod compute so much else that its device holds nothing that it held."""
        chance = Random(pod)
        with self.stack.kubectl.forwarded(f"pod/{pod}", 8000) as url:
            for _ in range(3):
                prompt = [chance.randrange(100, 4000) for _ in range(DEVICE * 2 // 5)]
                post(f"{url}/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1})


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def post(url: str, body: object) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def words(topic: str, count: int) -> str:
    return " ".join(f"{topic}{number * number}" for number in range(count))


@pytest.fixture
def tiers(tiered: Stack) -> Iterator[Tiers]:
    with tiered.admin() as admin:
        all_live(tiered, admin)
        found = Tiers(tiered, admin)
        wait(lambda: found.known()[0] == 1, "the picker reaches the coordinator")
        yield found


@pytest.fixture
def talk(tiered: Stack, tiers: Tiers, request: pytest.FixtureRequest) -> Iterator[Talk]:
    with tiered.entered() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield Talk(client, tiers.admin, [{"role": "system", "content": f"This is {request.node.name}."}])


@dataclass(frozen=True)
class Return:
    """A conversation goes on when its blocks have left the device."""

    held: int
    """Tokens of whole blocks of its first prompt."""
    turn: Turn
    l2: float
    """Tokens that the node's LMCache found there meanwhile."""


def returned(talk: Talk, tiers: Tiers, *, forget_l1: bool) -> Return:
    first = talk.say(words("try-", 300))
    tiers.settled()
    tiers.fill(first.endpoint)
    if forget_l1:
        tiers.forget_l1()
    tiers.settled()
    before = tiers.loaded()
    turn = talk.say("And then?")
    assert turn.read
    held, tier = first.prompt // BLOCK * BLOCK, "l2" if forget_l1 else "l1"
    # LMCache counts a moment after the pod answers.
    wait(lambda: tiers.loaded()[tier] - before[tier] >= held, f"{tier} had it")
    return Return(held, turn, tiers.loaded()["l2"] - before["l2"])


def test_a_conversation_returns_to_the_pod_that_holds_it(talk: Talk) -> None:
    turns = [talk.say(words(f"turn{number}-", 60)) for number in range(4)]
    assert len({turn.endpoint for turn in turns}) == 1
    assert turns[0].cached == 0
    for before, turn in pairwise(turns):
        assert turn.cached >= before.prompt // BLOCK * BLOCK > 0
    assert all(turn.read for turn in turns)
    assert [turn.predicted for turn in turns] == [turn.cached for turn in turns]


def test_what_falls_off_the_device_is_known_to_be_in_the_node_s_memory(talk: Talk, tiers: Tiers) -> None:
    found = returned(talk, tiers, forget_l1=False)
    assert found.turn.predicted == found.turn.cached >= found.held > 0
    assert found.l2 == 0


def test_what_falls_off_the_node_is_known_to_be_on_the_volume(talk: Talk, tiers: Tiers) -> None:
    found = returned(talk, tiers, forget_l1=True)
    assert found.turn.predicted == found.turn.cached >= found.held > 0


def test_the_doctor_finds_nothing_wrong_from_within(tiered: Stack, tiers: Tiers) -> None:
    (picker,) = tiered.kubectl.pods("warmpath")
    where = (f"--pool-namespace={NAMESPACE}", "--pool-name=llm", "--coordinator=http://lmcache-coordinator:9300")
    said = json.loads(tiered.kubectl("exec", picker, "--", "warmpath", "doctor", "--json", *where))
    assert len(said["examined"]) == 3
    assert said["findings"] == []
