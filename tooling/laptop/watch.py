"""While the chain runs: its files are followed, and pods and replicas that end by themselves are done without."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import yaml

from epp.documents.files import read_documents, stamp_of
from epp.errors import ConfigError
from gateway.errors import GatewayError
from tooling.laptop.chain import Chain, ChainError

INTERVAL = 0.2
SETTLED = 3
"""A change of files counts once it has stood for this many intervals: writers need their time."""


async def watch(chain: Chain, tell: Callable[[str], None]) -> None:
    """Never return: go on, and `tell` in one sentence what changed. ChainError when there is no going on.

    A pod that ends leaves the endpoints file, as a pod that is not ready leaves a pool in a cluster; a replica that
    ends leaves Envoy's configuration. Files that are wrong are refused, and what was before stays.
    """
    applied = last = stamp_of(chain.files)
    same = 0
    while True:
        await asyncio.sleep(INTERVAL)
        for name, sentence in chain.processes.ended():
            await _without(chain, name, sentence, tell)
        if (status := chain.envoy.status) is not None:
            raise ChainError(f"Envoy ended with status {status}")
        now = stamp_of(chain.files)
        same = same + 1 if now == last else 0
        last = now
        if same >= SETTLED and now != applied:
            applied = now
            await _apply(chain, tell)


async def _without(chain: Chain, name: str, sentence: str, tell: Callable[[str], None]) -> None:
    if any(pod.name == name for pod in chain.pods):
        chain.gone.append(name)
        tell(f"{sentence}; the others go on without it")
        _leave(chain.endpoints_file, name, tell)
        return
    chain.replicas = [replica for replica in chain.replicas if replica.name != name]
    if not chain.replicas:
        raise ChainError(sentence)
    tell(f"{sentence}; the others go on without it")
    await _apply(chain, tell)


def _leave(file: Path, name: str, tell: Callable[[str], None]) -> None:
    """Take an endpoint out of the endpoints file, which a person may have edited."""
    try:
        content = read_documents(file)[0].content
        content["endpoints"] = [entry for entry in content["endpoints"] if entry.get("name") != name]
    except (ConfigError, LookupError, TypeError, AttributeError) as error:
        tell(f"{file.name} still has {name}: {' '.join(str(error).split())}")
        return
    fresh = file.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(content), encoding="utf-8")
    fresh.replace(file)


async def _apply(chain: Chain, tell: Callable[[str], None]) -> None:
    try:
        if await chain.reload():
            tell("the gateway follows the changed files")
    except (ChainError, ConfigError, GatewayError) as error:
        tell(f"refused, the old files stay in force: {error}")
