import json
import subprocess
import sys
from pathlib import Path

import pytest

from hack.benches.rig.envoy import Listener, Pod, config


@pytest.mark.envoy
def test_envoy_accepts_it(tmp_path: Path) -> None:
    listeners = {
        "Envoy alone": Listener(20001),
        "a": Listener(20002, 20010, "full-duplex"),
        "b": Listener(20003, 20010, "lean"),
        "c": Listener(20004, 20010, "lean", (20011,), 0.1),
    }
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(config(listeners, [Pod(20020), Pod(20020, "127.0.0.2")])))
    envoy = Path(sys.executable).with_name("envoy")
    done = subprocess.run(
        [envoy, "--mode", "validate", "--config-path", path, "--disable-hot-restart"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_door_is_one_cluster_and_the_wirings_differ_in_the_answer_alone() -> None:
    made = config({"a": Listener(1, 9, "full-duplex"), "b": Listener(2, 9, "lean"), "c": Listener(3)}, [Pod(5)])
    resources = made["static_resources"]
    assert [cluster["name"] for cluster in resources["clusters"]] == ["pods", "epp-9"]
    filters = [
        listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
        for listener in resources["listeners"]
    ]
    assert [len(each) for each in filters] == [2, 2, 1]
    full, lean = (each[0]["typed_config"]["processing_mode"] for each in filters[:2])
    assert {name for name in full if full[name] != lean[name]} == {"response_body_mode"}


def test_answers_come_later_once_an_endpoint_is_picked() -> None:
    made = config({"a": Listener(1, 9, "lean", (), 0.1)}, [Pod(5)])
    manager = made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    names = [each["name"].rpartition(".")[2] for each in manager["http_filters"]]
    assert names == ["ext_proc", "fault", "router"]
    assert manager["http_filters"][1]["typed_config"]["delay"]["fixed_delay"] == "0.1s"
