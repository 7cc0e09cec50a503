"""`warmpath explain` against a configuration, and against a running picker's port."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from epp.admin.recorder import Decisions
from epp.admin.server import AdminServer, AdminSettings
from epp.errors import BadRequest, ConfigError
from epp.parsing.request import RawRequest
from epp.telemetry.metrics import Metrics
from tests.support.scheduling.decisions import decision, endpoint
from tooling.explain.command import ExplainOptions, main

ENDPOINTS = "endpoints: [{name: a, address: 127.0.0.1, port: 8000}, {name: b, address: 127.0.0.1, port: 8001}]\n"
POLICY = (
    "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: by-label, parameters: "
    "{label: tier, validValues: [gold], allowsNoLabel: true}}, {type: queue-scorer}]\n"
)


@pytest.fixture
def asked(tmp_path: Path) -> ExplainOptions:
    (tmp_path / "endpoints.yaml").write_text(ENDPOINTS)
    (tmp_path / "prompt.txt").write_text("Why is the sky blue?")
    return ExplainOptions(
        file=tmp_path / "prompt.txt", model="sim", endpoints=(tmp_path / "endpoints.yaml",), strategy="prefix-aware"
    )


def changed(options: ExplainOptions, **changes: Any) -> ExplainOptions:
    return ExplainOptions(**{**vars(options), **changes})


def test_a_strategy_is_asked_without_a_picker(asked: ExplainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["pool"] == "default/default"
    assert said["decision"]["endpoint"] == "default/a"
    assert {row["endpoint"] for row in said["decision"]["profiles"][0]["endpoints"]} == {"default/a", "default/b"}
    assert main(asked, as_json=False) == 0
    assert "goes to default/a (127.0.0.1:8000)" in capsys.readouterr().out


def test_a_file_is_asked_and_refusals_are_answers(
    asked: ExplainOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    mine = changed(asked, strategy=None, config=tmp_path / "policy.yaml")
    assert main(mine, as_json=True) == 0
    assert "queue-scorer" in capsys.readouterr().out
    wrong = changed(mine, file=None, curl="curl -d '{}' http://gw/v1/chat/completions")
    assert main(wrong, as_json=False) == 1
    assert "refused with 400 (model): model: missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"endpoints": ()}, "--endpoints: missing; a configuration without a picker needs the pool's endpoints"),
        ({"pool": "other"}, "--pool: got 'other'; expected one of default/default"),
        ({"file": Path("/nowhere")}, "/nowhere: cannot be read: No such file"),
        (
            {"endpoints": (), "strategy": None, "url": "http://127.0.0.1:1"},
            "--url: http://127.0.0.1:1: .*; expected the metrics port of a running picker",
        ),
        ({"endpoints": (), "strategy": None, "token_file": Path("/nowhere")}, "--token-file: /nowhere cannot be read"),
    ],
)
def test_who_cannot_be_asked_is_said(asked: ExplainOptions, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{error}"):
        main(changed(asked, **changes), as_json=True)


async def test_a_running_picker_is_asked_over_http(asked: ExplainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, RawRequest]] = []

    async def explain(pool: str, raw: RawRequest) -> dict[str, Any]:
        seen.append((pool, raw))
        if pool == "none":
            raise BadRequest("pool: got 'none'", param="pool")
        return {"pool": "default/p", "waiting": None, "decision": decision("r", [endpoint(1)]).as_dict()}

    server = AdminServer(Metrics(), [], Decisions(), list, str, AdminSettings(port=0))
    async with server:
        live = changed(
            asked,
            endpoints=(),
            strategy=None,
            url=f"http://127.0.0.1:{server.port}/",
            header=("X-A: b", "Authorization: c"),
        )
        with pytest.raises(ConfigError, match="answers 404 and explains nothing"):
            await asyncio.to_thread(main, live, as_json=True)
        server.explain_by(explain)
        assert await asyncio.to_thread(main, live, as_json=False) == 0
        assert await asyncio.to_thread(main, changed(live, pool="none"), as_json=False) == 1
    shown = capsys.readouterr().out
    assert "goes to default/pod-1" in shown
    assert "refused with 400 (pool): pool: got 'none'" in shown
    (pool, raw), _ = seen
    assert (pool, raw.method, raw.path, raw.headers["x-a"]) == ("", "POST", "/v1/chat/completions", "b")
    assert b"Why is the sky blue?" in raw.body
    assert raw.headers["authorization"] == "c"
