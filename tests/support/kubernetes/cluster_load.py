"""Steady load from within a cluster: `python -m tests.support.kubernetes.cluster_load URL`.

Each line on its input begins another era and is answered with a line of JSON that says how things stand; at the end of
the input the load ends, and a last such line says what became of it.
"""

import asyncio
import json
import sys

from tests.support.gateway.steady_load import SteadyLoad, steady_load


def _line(load: SteadyLoad) -> str:
    pods = {era: sorted(names) for era, names in load.pods.items()}
    return json.dumps({"era": load.era, "answered": load.answered, "pods": pods, "lost": load.lost})


async def _run(url: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with steady_load(url, plain=3, streams=3, large=1) as load:
        while await reader.readline():
            load.era += 1
            print(_line(load), flush=True)
    print(_line(load), flush=True)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1]))
