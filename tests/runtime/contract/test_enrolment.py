"""Lines and proofs of the enrolment."""

from __future__ import annotations

import pytest

from distrun_runtime.contract import enrolment
from distrun_runtime.contract.enrolment import AGENT, CLAIM, COORDINATOR, REDIAL, Claim
from distrun_runtime.errors import WireError

SECRET = "5e" * 32
WHERE = {"job": "calm-otter-7f3", "place": "3", "pin": "ab" * 32, "nonces": ("c" * 32, "a" * 32)}


def test_a_proof_holds_for_one_key_direction_kind_job_place_pin_and_pair_of_nonces() -> None:
    changed = [
        {},
        {"job": "other"},
        {"place": "4"},
        {"pin": "ac" * 32},
        {"nonces": ("d" * 32, "a" * 32)},
        {"nonces": ("c" * 32, "b" * 32)},
    ]
    found = [enrolment.proof(SECRET, AGENT, CLAIM, **{**WHERE, **each}) for each in changed]  # type: ignore[arg-type]
    found += [
        enrolment.proof(SECRET, side, kind, **WHERE)  # type: ignore[arg-type]
        for side, kind in ((AGENT, REDIAL), (COORDINATOR, CLAIM), (COORDINATOR, REDIAL))
    ]
    found.append(enrolment.proof("5f" * 32, AGENT, CLAIM, **WHERE))  # type: ignore[arg-type]
    assert len(set(found)) == len(found) == 10
    assert all(len(each) == 64 for each in found)


@pytest.mark.parametrize("is_redial", [False, True])
@pytest.mark.parametrize("program", [False, True])
def test_a_claim_is_read_as_it_was_written(is_redial: bool, program: bool) -> None:
    made = Claim(is_redial, "calm-otter-7f3", "container_e17_1410901929263_0002_01_000004", "a" * 32, "b" * 64, program)
    line = enrolment.claim(made)
    assert line.endswith(b"\n")
    assert enrolment.claim_of(line[:-1]) == made


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1",
        b"[]",
        b"{}",
        b'{"type":1}',
        b"\xff",
        b"[" * 2000,
        b'{"type":"claim"}',
        b'{"type":"welcome","job":"j","place":"p","nonce":"n","proof":"p"}',
        b'{"type":"claim","job":"j","place":"a\\nb","nonce":"n","proof":"p"}',
        b'{"type":"claim","job":"j","place":"a b","nonce":"n","proof":"p"}',
        b'{"type":"claim","job":"j","place":"","nonce":"n","proof":"p"}',
        b'{"type":"claim","job":"j","place":["3"],"nonce":"n","proof":"p"}',
        b'{"type":"claim","job":"j","place":"%s","nonce":"n","proof":"p"}' % (b"x" * 129),
    ],
)
def test_what_is_no_claim_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        enrolment.claim_of(line)


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match=r"expected enrolment version 1, got .*'version': 2"):
        enrolment.nonce_of(enrolment.encode(type="enrol", version=2, nonce="c" * 32))


def test_the_longest_claim_fits_a_line() -> None:
    longest = "\U0001f40d" * enrolment.PLACE_LENGTH
    assert len(enrolment.claim(Claim(False, "j" * 64, longest, "a" * 32, "b" * 64, True))) <= enrolment.LINE_BYTES
