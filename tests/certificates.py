"""Certificates for tests, made by the `openssl` command: an authority, and engines signed by it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def authority(folder: Path, name: str) -> Path:
    """Return the certificate of a new authority; its key lies beside it. Skips without openssl."""
    certificate = folder / f"{name}.pem"
    _openssl("req", "-x509", *_new_key(folder, name), "-days", "2", "-subj", f"/CN={name}")
    return certificate


def signed(folder: Path, name: str, signer: Path, *, host: str = "IP:127.0.0.1") -> Path:
    """Return the certificate of `host`, signed by an authority; its key lies beside it."""
    certificate, request = folder / f"{name}.pem", folder / f"{name}.csr"
    key = key_of(certificate)
    _openssl("req", *_new_key(folder, name, out=request), "-subj", f"/CN={name}")
    names = folder / f"{name}.ext"
    names.write_text(f"subjectAltName={host}\n")
    _openssl(
        *("x509", "-req", "-in", str(request), "-out", str(certificate), "-days", "2"),
        *("-CA", str(signer), "-CAkey", str(key_of(signer)), "-CAcreateserial"),
        *("-extfile", str(names)),
    )
    key.chmod(0o600)
    return certificate


def key_of(certificate: Path) -> Path:
    """Return the file of a certificate's private key."""
    return certificate.with_suffix(".key")


def _new_key(folder: Path, name: str, *, out: Path | None = None) -> tuple[str, ...]:
    return (
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-keyout", str(folder / f"{name}.key"), "-out", str(out or folder / f"{name}.pem")),
    )


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not installed")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
