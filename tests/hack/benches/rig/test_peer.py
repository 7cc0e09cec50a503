import argparse

import pytest

from hack.benches.rig.peer import peer


def test_a_peer_is_a_name_and_a_command() -> None:
    assert peer("llm-d=run it {grpc_port} --a=b") == ("llm-d", "run it {grpc_port} --a=b")
    for wrong in ("", "=run", "name=", "warmpath=run", "a,b=run"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=COMMAND"):
            peer(wrong)
