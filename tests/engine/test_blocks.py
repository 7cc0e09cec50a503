"""Our blocks beside vLLM's own: which are given, hit and evicted, for random requests, and what is cached then."""

import json
import subprocess
from pathlib import Path
from random import Random

from tests.support.engines.block_requests import OurPool, outcomes, random_events

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("blocks_of_vllm.py")


def test_blocks_are_given_hit_and_evicted_as_in_vllm(python: Path) -> None:
    draw = Random(11)
    asked = [(draw.randint(8, 60), size, random_events(draw, size, 40)) for size in (1, 4, 16, 64) for _ in range(25)]
    environment = {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, SCRIPT], input=json.dumps(asked), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(theirs) == len(asked)
    for (count, size, events), outcome in zip(asked, theirs, strict=True):
        for answers in (True, False):
            assert list(outcomes(events, OurPool(count, size, answers))) == outcome
