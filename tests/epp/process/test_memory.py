import gc
import subprocess
import sys

from epp.process.memory import rarely_collect

FAULTS = """
import resource
from epp.process.memory import keep_freed
assert keep_freed()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        bytes(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # 25,600 pages were used


def test_what_start_up_made_is_not_collected() -> None:
    before = gc.get_threshold()
    try:
        rarely_collect()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
