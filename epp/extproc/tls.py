"""Certificates of the ext_proc port: self-signed by default, as gateways expect of a picker; or from a directory.

The reference picker's flags and files (GIE v1.5 `--secure-serving`, `--cert-path`): `tls.crt` and `tls.key`, PEM. A
directory is looked at again for each new connection, so a renewed certificate needs no restart.
"""

import os
import ssl
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError
from epp.process.follow import Stamp, stamp
from epp.telemetry.metrics import Metrics

if TYPE_CHECKING:
    import grpc

_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
"""OpenSSL's names for a handshake that does not begin as TLS does."""

LIFETIME = timedelta(days=3650)
"""Of a self-signed certificate; clients do not verify it, it only makes the connection private."""

Pair = tuple[bytes, bytes]
"""Private key and certificate chain, PEM."""


class Certificate:
    """What the ext_proc port shows gateways: `tls.crt` and `tls.key` of `directory`, or (None) a pair made now.

    ConfigError if the pair cannot be used now. Later a bad one is refused, the one before stays in use, and
    `metrics.degraded("certificate-refused")` says why.
    """

    def __init__(self, directory: Path | None, metrics: Metrics, ciphers: str | None = None) -> None:
        """`ciphers`: for TLS 1.2, in OpenSSL's names. grpc reads its own from GRPC_SSL_CIPHER_SUITES."""
        self._directory = directory
        self._metrics = metrics
        self._pair = make_pair() if directory is None else read_pair(directory)
        self._ciphers = ciphers
        self._loaded = _context(self._pair, ciphers)
        self._seen = self._look()

    def context(self) -> ssl.SSLContext:
        """For a server that speaks HTTP/2; each handshake gets the pair that is there then."""
        context = _context(self._pair, self._ciphers)
        context.sslobject_class = _telling(self._not_tls)
        if self._directory is not None:
            context.sni_callback = self._before_handshake
        return context

    def credentials(self) -> "grpc.ServerCredentials":
        """The same for grpc."""
        import grpc

        if self._directory is None:
            return grpc.ssl_server_credentials([self._pair])
        return grpc.dynamic_ssl_server_credentials(_configuration(self._pair), self._renewed)

    def _not_tls(self) -> None:
        expected = "expected TLS at the gateway, or --secure-serving=false here"
        self._metrics.degraded("gateway-not-tls", f"it speaks no TLS, and this port does; {expected}")

    def _before_handshake(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL asks with each handshake, whether or not the gateway names a server."""
        if (pair := self._renewal()) is not None:
            self._loaded = _context(pair, self._ciphers)
        connection.context = self._loaded

    def _renewed(self) -> Any:
        """grpc asks the same, on a thread of its own: a new pair, or None to go on as before."""
        pair = self._renewal()
        return None if pair is None else _configuration(pair)

    def _renewal(self) -> Pair | None:
        """The pair, if its files have changed and are good."""
        now = self._look()
        if now == self._seen or self._directory is None:
            return None
        self._seen = now
        try:
            return read_pair(self._directory)
        except ConfigError as error:
            self._metrics.degraded("certificate-refused", str(error))
            return None

    def _look(self) -> tuple[Stamp, ...]:
        if self._directory is None:
            return ()
        return tuple(stamp(self._directory / name) for name in ("tls.key", "tls.crt"))


def _telling(not_tls: Callable[[], None]) -> type[ssl.SSLObject]:
    """Connections whose handshakes call it. The event loop ends such a connection without a word to anybody."""

    class Telling(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLError as error:
                if error.reason in _NOT_TLS:
                    not_tls()
                raise

    return Telling


def make_pair() -> Pair:
    """A new P-256 key and a certificate it signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Warmpath")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, certificate.public_bytes(serialization.Encoding.PEM)


def read_pair(directory: Path) -> Pair:
    """The pair in `directory`. ConfigError if a file is missing, is no PEM, or the two do not belong together."""
    pair = _read(directory / "tls.key"), _read(directory / "tls.crt")
    try:
        key = serialization.load_pem_private_key(pair[0], password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--cert-path: {directory / 'tls.key'}", "expected a PEM private key without a password"
        ) from error
    try:
        certificate = x509.load_pem_x509_certificates(pair[1])[0]
    except (ValueError, IndexError) as error:
        raise ConfigError(f"--cert-path: {directory / 'tls.crt'}", "expected PEM certificates") from error
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"--cert-path: {directory}", "tls.key is not the key of the certificate in tls.crt")
    return pair


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("--cert-path", f"cannot read {path}: {error.strerror}") from error


def _configuration(pair: Pair) -> Any:
    import grpc

    return grpc.ssl_server_certificate_configuration([pair])


def _context(pair: Pair, ciphers: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if ciphers is not None:
        context.set_ciphers(ciphers)
    try:
        load_pair(context, pair)
    except OSError as error:
        raise ConfigError("--cert-path", f"this certificate cannot be used: {error}") from error
    return context


def load_pair(context: ssl.SSLContext, pair: Pair) -> None:
    """Have the context show this pair. Raises OSError."""
    # `ssl` takes nothing but files that have a name. One in memory where there can be: a container may have no other.
    memory = sys.platform == "linux"
    with open(os.memfd_create("pair"), "wb") if memory else NamedTemporaryFile(suffix=".pem") as file:
        file.write(b"\n".join(pair))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}" if memory else file.name)
