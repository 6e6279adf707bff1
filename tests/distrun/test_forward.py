from __future__ import annotations

import pytest

from distrun.request import FORWARDED_PREFIXES, forwarded, given, is_forwarded, parse_env, parse_role_env
from distrun_runtime.contract import environ


def names(**outer: str) -> list[str]:
    return [setting.name for setting in forwarded(outer)]


@pytest.mark.parametrize("prefix", FORWARDED_PREFIXES)
def test_every_prefix_is_forwarded(prefix: str) -> None:
    assert names(**{prefix + "ANY_NAME": "1"}) == [prefix + "ANY_NAME"]


def test_what_the_documents_tell_users_to_export_is_forwarded() -> None:
    outer = {"PS_VERBOSE": "1", "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "500", "DMLC_INTERFACE": "eth0"}
    assert names(**outer) == sorted(outer)


def test_every_tuning_row_of_the_table_is_forwarded() -> None:
    rows = [row.name for row in environ.TABLE if row.group == "tuning"]
    assert rows
    assert names(**dict.fromkeys(rows, "1")) == sorted(rows)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "PYTHONPATH",
        "AWS_REGION",
        "AWS_PROFILE",
        "PS1",
        "MY_NCCL_DEBUG",
        "XDG_CACHE_HOME",
    ],
)
def test_places_of_this_machine_stay_here(name: str) -> None:
    assert not is_forwarded(name)


def test_what_launch_py_gave_over_ssh_goes_along_and_is_hidden() -> None:
    launch_py = ("OMP_NUM_THREADS", "KMP_AFFINITY", "LD_LIBRARY_PATH", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    settings = forwarded(dict.fromkeys([*launch_py, "DMLC_INTERFACE", "AWS_SESSION_TOKEN"], "x"))
    assert {setting.name for setting in settings} == {*launch_py, "DMLC_INTERFACE", "AWS_SESSION_TOKEN"}
    assert all(setting.hidden for setting in settings)
    assert [setting.name for setting in settings if setting.joins] == ["LD_LIBRARY_PATH"]


def test_a_path_that_the_user_names_replaces_the_hosts() -> None:
    outer = {"LD_LIBRARY_PATH": "/here"}
    for words in (["LD_LIBRARY_PATH=/x"], ["LD_LIBRARY_PATH"]):
        own, _ = parse_env(words, outer)
        assert not given([*forwarded(outer), *own], "worker")["LD_LIBRARY_PATH"].joins


@pytest.mark.parametrize("name", ["DMLC_TOKEN", "JAX_API_KEY", "MXNET_my_password", "TORCH_Secret_X"])
def test_secrets_stay_here_whatever_their_prefix(name: str) -> None:
    assert not is_forwarded(name)


def test_what_distrun_sets_and_what_an_outer_job_left_is_never_forwarded() -> None:
    for row in environ.TABLE:
        if row.stale or row.use in (environ.GIVEN, environ.BOTH):
            assert not is_forwarded(row.name), row.name
    assert not is_forwarded("TORCHELASTIC_USE_AGENT_STORE")


def test_values_are_hidden_and_the_users_own_settings_win() -> None:
    outer = {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
    settings = forwarded(outer)
    assert all(setting.hidden and not setting.role for setting in settings)
    own, _ = parse_env(["OMP_NUM_THREADS=1"], outer)
    settings += own + parse_role_env("server", ["NCCL_DEBUG=WARN"])
    assert given(settings, "worker")["OMP_NUM_THREADS"].value == "1"
    assert given(settings, "worker")["NCCL_DEBUG"].value == "INFO"
    assert given(settings, "server")["NCCL_DEBUG"].value == "WARN"
