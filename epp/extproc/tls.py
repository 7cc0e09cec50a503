"""Certificates of the ext_proc port: self-signed by default, as gateways expect of a picker; or from a directory.

The reference picker's flags and files (GIE v1.5 `--secure-serving`, `--cert-path`): `tls.crt` and `tls.key`, PEM. A
directory is looked at again for each new connection, so a renewed certificate needs no restart.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from epp.errors import ConfigError
from epp.process.follow import Stamp, stamp
from epp.telemetry.metrics import Metrics

LIFETIME = timedelta(days=3650)
"""Of a self-signed certificate; clients do not verify it, it only makes the connection private."""

Pair = tuple[bytes, bytes]
"""Private key and certificate chain, PEM."""


def self_signed() -> grpc.ServerCredentials:
    """Credentials made now, for this process alone."""
    return grpc.ssl_server_credentials([make_pair()])


def from_directory(directory: Path, metrics: Metrics) -> grpc.ServerCredentials:
    """Credentials of `tls.crt` and `tls.key` in `directory`, followed as they change.

    ConfigError if they cannot be used now. Later a bad pair is refused, the one before stays in use, and
    `metrics.degraded("certificate-refused")` says why.
    """
    return grpc.dynamic_ssl_server_credentials(_configuration(read_pair(directory)), _Renewals(directory, metrics))


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
    return grpc.ssl_server_certificate_configuration([pair])


class _Renewals:
    """What grpc asks before each handshake, on a thread of its own: a new pair, or None to go on as before."""

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._directory = directory
        self._metrics = metrics
        self._seen = self._look()

    def __call__(self) -> Any:
        now = self._look()
        if now == self._seen:
            return None
        self._seen = now
        try:
            return _configuration(read_pair(self._directory))
        except ConfigError as error:
            self._metrics.degraded("certificate-refused", str(error))
            return None

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(stamp(self._directory / name) for name in ("tls.key", "tls.crt"))
