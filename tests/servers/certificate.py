"""A certificate for a stand-in server."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

CERTIFICATE_NAME = "certificate.pem"


def write_certificate(folder: Path, hosts: Sequence[str]) -> Path:
    """Write a key and its self-signed certificate for the hosts, valid for a day; return the file's path."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stand-in")])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    host_names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
    builder = builder.add_extension(host_names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    encoding, key_format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path = folder / CERTIFICATE_NAME
    path.write_bytes(
        key.private_bytes(encoding, key_format, serialization.NoEncryption()) + certificate.public_bytes(encoding)
    )
    return path
