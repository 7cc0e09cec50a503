"""How an Envoy in the pod of the endpoint picker goes: it takes leave of its clients and ends what it has.

`python -m gateway.drain --admin URL` runs as the picker's preStop hook. It imports next to nothing, so that it starts
at once where processor time is scarce.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Final

import click

LINGER: Final = 5.0
"""Seconds that new connections are still to be expected: as long as the word takes that this pod goes."""
LEAVE: Final = "/drain_listeners?graceful"
BUSY: Final = r"/stats?format=json&filter=^http\.port-[0-9]*\.downstream_rq_active$"
"""Of the listeners that `gateway.translate` makes."""
_POLL: Final = 0.25


def drain(
    admin: str,
    timeout: float,
    *,
    linger: float = LINGER,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return when the Envoy behind this admin URL has no request left, False if it still has after `timeout` seconds.

    OSError where it does not answer.
    """
    start = clock()
    _ask(admin + LEAVE, b"")
    while (past := clock() - start) < timeout:
        if past >= linger and not _requests(admin):
            return True
        sleep(_POLL)
    return False


def _requests(admin: str) -> int:
    stats = json.loads(_ask(admin + BUSY))["stats"]
    return sum(int(stat["value"]) for stat in stats if "value" in stat)


def _ask(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, body, timeout=5) as answer:
        content: bytes = answer.read()
        return content


@click.command()
@click.option("--admin", required=True, help="Envoy's admin interface: http://HOST:PORT.")
@click.option("--timeout", default=115.0, show_default=True, help="Seconds that requests may still take.")
def main(admin: str, timeout: float) -> None:
    """Drain the Envoy at --admin: 0 when it has no request left, 1 when it still has or does not answer."""
    try:
        done = drain(admin, timeout)
    except OSError as error:
        raise click.ClickException(f"{admin} does not answer: {error}") from None
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
