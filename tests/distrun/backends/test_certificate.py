"""The certificate of a job."""

from __future__ import annotations

import hashlib
import ssl

from cryptography import x509

from distrun.backends import bootstrap
from distrun_runtime.coordinator.listener import pin_of


def test_the_pin_is_the_sha256_of_the_certificate_as_peers_see_it() -> None:
    made = bootstrap.certificate("calm-otter-7f3")
    text = made.decode().partition("-----BEGIN PRIVATE KEY-----")[0]
    assert pin_of(made) == hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()


def test_each_job_has_a_key_of_its_own() -> None:
    one, other = bootstrap.certificate("j"), bootstrap.certificate("j")
    assert pin_of(one) != pin_of(other)
    assert one.count(b"-----BEGIN ") == 2


def test_dates_have_room_for_clocks_that_are_wrong() -> None:
    found = x509.load_pem_x509_certificate(bootstrap.certificate("j"))
    assert (found.not_valid_before_utc.year, found.not_valid_after_utc.year) == (2000, 2100)


def test_a_long_id_of_a_job_makes_a_certificate() -> None:
    bootstrap.certificate("x" * 200)
