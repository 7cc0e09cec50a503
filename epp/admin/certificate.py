"""TLS on the admin server, where a directory of `tls.crt` and `tls.key` is named; readers with certificates, if asked.

llm-d-router's flags `--metrics-cert-dir` and `--metrics-client-ca-file`. The pair is followed as it is renewed, the
authority of readers is read once.
"""

import ssl
from pathlib import Path

from epp.errors import ConfigError
from epp.process.follow import INTERVAL, Stamp, changes, stamp
from epp.telemetry.metrics import Metrics

CERT_DIR = "--metrics-cert-dir"
CLIENT_CA = "--metrics-client-ca-file"


class Certificate:
    """`context` is for the server. ConfigError if a file cannot be used now; later the pair before stays, and
    `metrics.degraded("certificate-refused")` says why.
    """

    def __init__(
        self, directory: Path, client_ca: Path | None, metrics: Metrics, *, interval: float = INTERVAL
    ) -> None:
        self._directory = directory
        self._metrics = metrics
        self._interval = interval
        self._seen = self._look()
        self.context = _context()
        self._load()
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except OSError as error:  # an SSLError is one
                raise ConfigError(CLIENT_CA, f"expected PEM certificates in {client_ca}: {_why(error)}") from None
            self.context.verify_mode = ssl.CERT_REQUIRED

    async def watch(self) -> None:
        """Take each good new pair for the connections that come after it, for ever."""
        async for _ in changes(self._look, self._seen, self._interval):
            try:
                self._load()
            except ConfigError as error:
                self._metrics.degraded("certificate-refused", str(error))

    def _load(self) -> None:
        pair = self._directory / "tls.crt", self._directory / "tls.key"
        try:
            _context().load_cert_chain(*pair)  # a context that a bad pair was loaded into is of no use any more
            self.context.load_cert_chain(*pair)
        except OSError as error:
            expected = f"expected tls.crt and its tls.key, PEM, in {self._directory}"
            raise ConfigError(CERT_DIR, f"{expected}: {_why(error)}") from None

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(stamp(self._directory / name) for name in ("tls.crt", "tls.key"))


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _why(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)
