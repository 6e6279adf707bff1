"""The table of variables and its reader."""

from __future__ import annotations

import os
import socket

import pytest

from distrun_runtime.contract import environ
from distrun_runtime.errors import ContractError


def test_names_stand_once_and_every_row_is_documented() -> None:
    assert len(environ.BY_NAME) == len(environ.TABLE)
    assert all(row.doc.endswith(".") or row.name == "JAX_COORDINATOR_ADDRESS" for row in environ.TABLE)


def test_every_default_is_a_value_that_the_variable_may_have() -> None:
    for row in environ.TABLE:
        if row.default not in (None, ""):
            text = str(int(row.default)) if row.type == environ.BOOL else str(row.default)
            assert environ.read(row.name, {row.name: text}) == row.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("PS_VERBOSE", "2", 2),
        ("PS_VERBOSE", "", 0),
        ("PS_HEARTBEAT_TIMEOUT", "1.5", 1.5),
        ("DISTRUN_PORTABLE", "1", True),
        ("DMLC_ROLE", "server", "server"),
        ("DMLC_PS_ROOT_PORT", " 9091 ", 9091),
    ],
)
def test_values_are_read_by_their_type(name: str, text: str, value: object) -> None:
    assert environ.read(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("PS_VERBOSE", "3", "integer from 0 to 2 (default 0)"),
        ("PS_VERBOSE", "loud", "integer from 0 to 2"),
        ("PS_HEARTBEAT_INTERVAL", "nan", "number from 0.1 to 3600"),
        ("DMLC_ROLE", "boss", "one of scheduler, server, worker"),
        ("DMLC_PS_ROOT_PORT", "65536", "integer from 1 to 65535"),
        ("DMLC_NUM_WORKER", "0", "integer, at least 1"),
        ("DISTRUN_PORTABLE", "yes", "0 or 1 (default 0)"),
    ],
)
def test_wrong_value_is_named_with_host_and_what_would_be_right(name: str, text: str, right: str) -> None:
    with pytest.raises(ContractError) as caught:
        environ.read(name, {name: text})
    for part in (name, repr(text), socket.gethostname(), right):
        assert part in str(caught.value)


def test_needed_variable_that_is_missing_is_explained() -> None:
    with pytest.raises(ContractError, match="DMLC_ROLE is not set on host"):
        environ.need("DMLC_ROLE", {})


def test_check_lists_every_wrong_tuning_variable() -> None:
    wrong = environ.check({"PS_VERBOSE": "x", "PS_RESEND": "x", "DMLC_ROLE": "x"})
    assert [text.partition("=")[0] for text in wrong] == ["PS_VERBOSE", "PS_RESEND"]


def test_stale_names_cover_what_describes_one_task_of_an_outer_job() -> None:
    stale = environ.STALE
    assert {"RANK", "DMLC_ROLE", "DISTRUN_JOB_ID", "MASTER_PORT", "SLURM_*"} <= set(stale)
    assert not {"PATH", "PYTHONPATH", "PS_VERBOSE", "DMLC_INTERFACE", "XDG_RUNTIME_DIR"} & set(stale)


def test_snapshot_in_bytes_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", os.fsdecode(b"\xff\xe9"))
    assert environ.snapshot_bytes()[b"ODD"] == b"\xff\xe9"
    assert environ.snapshot()["ODD"] == os.fsdecode(b"\xff\xe9")
