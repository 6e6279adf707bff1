"""The certificate of a job."""

from __future__ import annotations

import hashlib
import ssl

from cryptography import x509

from distrun.backends import bootstrap
from distrun_runtime.coordinator.listener import pin_of


def test_the_pin_is_the_sha256_of_the_certificate_as_peers_see_it() -> None:
    made = bootstrap.make("calm-otter-7f3")
    text = made.pem.decode().partition("-----BEGIN PRIVATE KEY-----")[0]
    assert made.pin == hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()
    assert made.pin == pin_of(made.pem)


def test_each_job_has_a_key_of_its_own_which_is_not_shown() -> None:
    one, other = bootstrap.make("j"), bootstrap.make("j")
    assert one.pin != other.pin
    assert "PRIVATE" not in repr(one)
    assert one.pem.count(b"-----BEGIN ") == 2


def test_dates_have_room_for_clocks_that_are_wrong() -> None:
    found = x509.load_pem_x509_certificate(bootstrap.make("j").pem)
    assert (found.not_valid_before_utc.year, found.not_valid_after_utc.year) == (2000, 2100)


def test_a_long_id_of_a_job_makes_a_certificate() -> None:
    bootstrap.make("x" * 200)
