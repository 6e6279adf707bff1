"""What `begin` gives."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from distrun_runtime.agent import share as shares
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import session
from distrun_runtime.contract.plan import Host, Plan, Task
from distrun_runtime.errors import ContractError


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def header(task_env: dict[str, str] | None = None, **members: object) -> dict[str, object]:
    task = Task("worker-0", "worker", 0, "d1", ("x",), "/", task_env or {}, secret_env=("KEY",))
    plan = Plan("j1", "", "local", ("x",), "/", (Host("d1", ports=("jax",)), Host("d2", "127.0.0.1")), (task,))
    whole = {
        "version": session.VERSION,
        "plan": plans.to_json(plan),
        "host": "d1",
        "token": "t",
        "secret_env": {"KEY": "s"},
    }
    return {**whole, **members}


def test_address_is_the_one_toward_the_other_hosts_unless_the_plan_says() -> None:
    share = shares.take(header())
    assert share.address == "127.0.0.1"
    assert set(share.ports()) == {"jax"}
    assert os.path.isdir(share.spool_folder)
    share.close()
    assert not os.path.exists(share.folder)


def test_held_ports_keep_to_the_range_of_the_tasks() -> None:
    with pytest.raises(ContractError, match="port range 'x'"):
        shares.take(header({"DISTRUN_PORT_RANGE": "x"}))


def test_marks_and_secrets_are_in_the_environment_and_cannot_be_overridden() -> None:
    share = shares.take(header())
    env = share.environment(share.plan.task("worker-0"), {"DISTRUN_JOB_ID": "forged", "DISTRUN_RANK": "7"})
    assert env[b"DISTRUN_JOB_ID"] == b"j1"
    assert env[b"DISTRUN_HOST"] == b"d1"
    assert env[b"DISTRUN_RANK"] == b"7"
    assert env[b"KEY"] == b"s"
    assert env[b"DISTRUN_TOKEN_FILE"] == os.fsencode(share.token_file)
    share.close()


@pytest.mark.parametrize(
    ("sent", "login", "activated", "expected"),
    [
        ("/a:/b", "", None, "/a:/b"),
        ("/a:/b", "/host:/b", None, "/a:/b:/host"),
        ("/a:/b", "/host", "/conda/lib:/host", "/conda/lib:/host:/a:/b"),
        ("/a", "", "/conda/lib", "/conda/lib:/a"),
        ("/a", "/host", "", "/a"),
        ("/a::", ":/host", None, "/a:/host"),
        ("/odd\udcff", "/host", None, "/odd\udcff:/host"),
    ],
)
def test_lists_of_folders_are_joined_and_activation_comes_first(
    monkeypatch: pytest.MonkeyPatch, sent: str, login: str, activated: str | None, expected: str
) -> None:
    name = "LD_LIBRARY_PATH"
    monkeypatch.setenv(name, login)
    share = shares.take(header())
    task = share.plan.task("worker-0")._replace(secret_env=(name,))
    share = share._replace(plan=share.plan._replace(joined=(name,), tasks=(task,)), secret_env={name: sent})
    if activated is not None:
        share = share._replace(base={**share.base, name.encode(): os.fsencode(activated)})
    env = share.environment(task, {})
    assert env[name.encode()] == expected.encode("utf-8", "surrogateescape")
    other = task._replace(secret_env=())
    assert share.environment(other, {name: "/mine"})[name.encode()] == b"/mine", "what the user gave a role replaces it"
    share.close()


def test_job_without_a_token_names_no_token_file() -> None:
    share = shares.take(header(token=""))
    assert b"DISTRUN_TOKEN_FILE" not in share.environment(share.plan.task("worker-0"), {})
    share.close()


@pytest.mark.parametrize(
    ("members", "words"), [({"version": 1}, "version 1"), ({"host": "d9"}, "no host 'd9'; it has: d1, d2")]
)
def test_share_that_does_not_fit_is_refused(members: dict[str, object], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        shares.take(header(**members))


def test_the_jobs_folder_is_named_only_where_it_is(tmp_path: Path) -> None:
    share = shares.take(header())
    task = share.plan.task("worker-0")
    there = {"DISTRUN_RUN_DIR": str(tmp_path)}
    assert share.environment(task, there)[b"DISTRUN_RUN_DIR"] == os.fsencode(tmp_path)
    assert b"DISTRUN_RUN_DIR" not in share.environment(task, {"DISTRUN_RUN_DIR": str(tmp_path / "elsewhere")})
    share.close()


# Environments


def test_stale_names_go_first_and_the_later_addition_wins() -> None:
    base = {b"RANK": b"9", b"SLURM_X": b"1", b"SLURM": b"2", b"PATH": b"/bin", b"\xff": b"\xfe"}
    env = shares.compose(base, ["RANK", "SLURM_*"], {"RANK": "0", "A": "1"}, {"A": "2"})
    assert env == {b"SLURM": b"2", b"PATH": b"/bin", b"\xff": b"\xfe", b"RANK": b"0", b"A": b"2"}
    assert base[b"RANK"] == b"9"


def test_star_alone_removes_everything() -> None:
    assert shares.compose({b"A": b"1"}, ["*"], {"B": "2"}) == {b"B": b"2"}


def test_text_stands_for_the_bytes_that_were_typed() -> None:
    assert shares.exact(os.fsdecode(b"a\xff\xc3\xa9")) == b"a\xff\xc3\xa9"
    assert shares.exact("é") == b"\xc3\xa9"


# Held ports


def test_held_port_is_within_the_range_and_not_given_twice() -> None:
    with shares.hold("127.0.0.1") as first:
        base = first.getsockname()[1]
        low = max(1024, min(base, 65435))
        span = "%d-%d" % (low, low + 100)
        with shares.hold("127.0.0.1", span) as second, shares.hold("127.0.0.1", span) as third:
            numbers = {base, second.getsockname()[1], third.getsockname()[1]}
            assert len(numbers) == 3
            assert numbers - {base} <= set(range(low, low + 101))


def test_range_without_a_free_port_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        number = taken.getsockname()[1]
        with pytest.raises(ContractError, match="no free port in %d-%d" % (number, number)):
            shares.hold("127.0.0.1", "%d-%d" % (number, number))


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_address_family_of_the_host_is_held() -> None:
    with shares.hold("fd00::5") as held:
        assert held.family == socket.AF_INET6
