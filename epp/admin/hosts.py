"""Whom a Host header may name: a browser must not read us for a page whose own name resolves here (DNS rebinding)."""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final

from epp.errors import ConfigError

FLAG: Final = "--metrics-allowed-host"
LOCAL: Final = ("localhost", "ip6-localhost")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


class Hosts:
    """Names we are known by: any IP address, the names of loopback, `host` and `names`, each with any port.

    Raises ConfigError for one of `names` that is no host name.
    """

    def __init__(self, host: str = "", names: Sequence[str] = ()) -> None:
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(FLAG, f"expected a host name without scheme and port, got {name[:100]!r}")
        self._names = frozenset(_name(each) for each in (*LOCAL, host, *names) if each and not _is_address(each))

    def refusal(self, given: Sequence[str]) -> str:
        """Why requests with these Host headers get no answer; empty if they do.

        None at all is fine: browsers, whom this is about, always send one.
        """
        if len(given) > 1:
            return f"expected one Host header, got {len(given)}"
        if not given or (name := _name(given[0])) in self._names or _is_address(name):
            return ""
        known = ", ".join(sorted(self._names))
        return f"Host: got {given[0][:100]!r}; expected an IP address, {known}, or a name given with {FLAG}"


def _name(host: str) -> str:
    """Without port, brackets and the root's dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
