from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from epp.documents.durations import seconds_of
from epp.errors import ConfigError
from epp.plugin import Load
from epp.protocol import REQUEST_TTL
from tooling.replay.pod import VirtualPod
from tooling.replay.policies import policy
from tooling.replay.replica import Replica
from tooling.replay.trace import Piece, TraceRequest
from tooling.simulator.presets import pods

ASK = TraceRequest(0.0, (Piece(1, 512),), 10, session="s")


def never(seconds: float, call: Callable[[], None]) -> NoReturn:
    raise AssertionError("nothing waits here")


def replica(spec: str = "prefix-aware", *, sees_answer: bool = True) -> tuple[Replica, Sequence[VirtualPod]]:
    made = [VirtualPod(f"pod-{n}", kind) for n, kind in enumerate(pods("3*laptop"))]
    return Replica(policy(spec).build, made, lambda: 0.0, Random(0), watched=float(sees_answer), later=never), made


def test_endpoints_are_the_pods_in_order() -> None:
    picker, made = replica()
    assert [picker.pod_of[endpoint] for endpoint in picker.endpoints] == made
    assert [endpoint.name for endpoint in picker.endpoints] == ["default/pod-0", "default/pod-1", "default/pod-2"]
    assert picker.endpoints[0].load.blocks == made[0].kind.parameters.blocks


def test_a_pod_that_comes_back_is_a_new_endpoint_in_its_old_place() -> None:
    picker, made = replica()
    old = picker.endpoints[1]
    picker.leave(made[1])
    picker.leave(made[1])
    assert old not in picker.endpoints
    picker.scraped(made[1], Load(waiting=9))
    ((_, announced),) = picker.announce(1, picker.choose(1, ASK))
    assert picker.adopt(ASK, made[1], announced) is None
    picker.join(made[1], 1.0)
    picker.join(made[1], 1.0)
    assert len(picker.endpoints) == 3
    assert picker.endpoints[1] is not old
    assert picker.endpoints[1].address == old.address


def test_a_request_is_what_the_parser_would_have_made() -> None:
    picker, _ = replica(sees_answer=False)
    request = picker.request(7, ASK)
    assert (request.id, request.tokens, len(request.prompt)) == ("7", 512, 2048)
    assert request.header("x-session-id") == "s"
    assert (request.stream, request.sees_answer) == (True, False)


@pytest.mark.parametrize(("ttl", "header"), [(None, None), (2.0, "2000000000ns"), (1e-12, "1ns")])
def test_how_long_a_request_may_wait_is_said_as_a_client_would(ttl: float | None, header: str | None) -> None:
    picker, _ = replica()
    said = picker.request(7, replace(ASK, ttl=ttl)).header(REQUEST_TTL)
    assert said == header
    assert said is None or seconds_of(said) > 0


def test_what_a_peer_sent_draws_what_follows() -> None:
    (peer, pods_of_peer), (picker, made) = replica(), replica()
    decision = peer.choose(1, ASK)
    place = pods_of_peer.index(peer.pod_of[decision.endpoint])
    ((_, announced),) = peer.announce(1, decision)
    adopted = picker.adopt(ASK, made[place], announced)
    assert adopted is not None
    assert adopted.request.elsewhere
    for number in (2, 3):  # not by turns: the second and the third stay there too
        assert picker.pod_of[picker.choose(number, ASK).endpoint] is made[place]


BROKEN = """
from epp.plugin import PrefixMatch, Producer, Scorer
class Later:
    def __await__(self):
        yield

class Raises(Scorer):
    def score(self, request, endpoints):
        raise RuntimeError("no")

class Waits(Producer):
    produces = PrefixMatch
    async def prepare(self, request):
        await Later()
    def produce(self, request, endpoints):
        return {}
"""


def test_a_plugin_that_raises_ends_the_replay_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(BROKEN)
    picker, _ = replica(f"{tmp_path}/raising.py:Raises")
    with pytest.raises(ConfigError, match=r"plugin raising\.Raises: RuntimeError: no"):
        picker.choose(1, ASK)


def test_a_plugin_that_waits_cannot_be_replayed(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(BROKEN)
    (tmp_path / "waiting.yaml").write_text(
        "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: waiting.Waits}, {type: random-picker}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: random-picker}]}]\n"
    )
    picker, _ = replica(f"{tmp_path}/waiting.yaml")
    with pytest.raises(ConfigError, match="cannot be replayed"):
        picker.choose(1, ASK)
