"""Makes the TLS certificate of one job, for agents that dial back.

The certificate proves nothing by itself: agents compare its SHA-256 with the one that they were given, and ignore names
and dates. The private key stays in memory. Where it has to go to another process, it goes by standard input or in a
file of mode 0600 in a private folder, never on a command line.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from distrun_runtime.contract import enrolment

_FROM = datetime.datetime(2000, 1, 1)
_UNTIL = datetime.datetime(2100, 1, 1)
"""Fixed dates, since the clocks of a job's hosts differ."""


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key."""

    pem: bytes = field(repr=False)
    """Certificate, then key, as `ssl.SSLContext.load_cert_chain` reads them. Secret."""
    pin: str
    """SHA-256 of the certificate (DER), hex: what agents compare."""


def make(job: str) -> Certificate:
    """Return a new self-signed certificate for the job of that id: EC P-256, no names but the job's."""
    # They take 50 ms to import, and most jobs have no listener.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"distrun {job}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM) + private, enrolment.pin_of(der))
