"""`distrun doctor` over real hosts, each of them broken in its own way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Site

ROOT = Path("/")
TIMES = ("--connect-timeout", "8")


@pytest.fixture(autouse=True)
def well(lab: Site) -> Iterator[None]:
    """Undo what a test wrote into a host: the disks of a host that boots are empty."""
    yield
    if (lab["h2"].root / "spoilt").exists():
        lab["h2"].kill()
        lab["h2"].boot()


def spoil(lab: Site, script: str) -> None:
    """Break something on h2."""
    lab["h2"].exec("sh", "-c", "touch /spoilt; " + script)


def doctor(lab: Site, *words: str, hosts: str = "h1,h2,h3") -> dict[str, Any]:
    done = lab.distrun("doctor", "--hosts", hosts, "--json", "--no-servers", *TIMES, *words, cwd=ROOT)
    value: dict[str, Any] = json.loads(done.out)
    assert value["schema"] == "distrun.doctor/1"
    assert value["exit_code"] == done.code, done
    return value


def found(value: dict[str, Any], mark: str) -> list[tuple[str, str]]:
    return [(row["host"], row["check"]) for row in value["rows"] if row["mark"] == mark]


def row(value: dict[str, Any], host: str, check: str) -> dict[str, Any]:
    (only,) = [each for each in value["rows"] if (each["host"], each["check"]) == (host, check)]
    assert isinstance(only, dict)
    return only


def test_hosts_in_order_have_no_fault(lab: Site) -> None:
    value = doctor(lab)
    assert (value["exit_code"], found(value, "bad")) == (0, [])
    for host in ("h1", "h2", "h3"):
        assert row(value, host, "data ports")["text"] == "reached by all 2 asked"
        assert lab[host].address in row(value, host, "address")["text"]
        assert value["facts"][host]["hostname"] == host


def test_the_table_folds_hosts_and_ends_faults_with_what_mends_them(lab: Site) -> None:
    lab["h2"].reject(22)
    done = lab.distrun("doctor", "--hosts", "h1,h2,h3", *TIMES, "--no-servers", cwd=ROOT, env={"LC_ALL": "C.UTF-8"})
    assert done.code == 3
    lines = done.out.splitlines()
    assert any(line.split()[:3] == ["✓", "python", "h[1,3]"] for line in lines), done.out
    at = next(index for index, line in enumerate(lines) if line.startswith("✗"))
    assert lines[at].split()[1:3] == ["connection", "h2"]
    assert lines[at + 1].strip().startswith("mend:")
    assert lines[-1].startswith("1 fault on 1 of 3 hosts")


def test_marks_are_ascii_where_nothing_else_can_be_shown(lab: Site) -> None:
    env = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = lab.distrun("doctor", "--hosts", "h1", "--no-servers", cwd=ROOT, env=env)
    assert done.out.isascii()
    assert any(line.startswith("ok") for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("reject", "connection"),
        ("down", "connection"),
        ("stop", "connection"),
        ("rekey", "host key"),
        ("lock", "login"),
    ],
)
def test_a_host_that_cannot_be_used_says_how_far_we_came(lab: Site, fault: str, check: str) -> None:
    if fault == "reject":
        lab["h2"].reject(22)
    elif fault == "lock":
        lab["h2"].restart_sshd({"AuthorizedKeysFile": "/none"})
    else:
        lab.fault(fault, "h2")
    value = doctor(lab)
    assert value["exit_code"] == 3
    assert ("h2", check) in found(value, "bad")
    assert row(value, "h2", check)["fix"]
    # The others are examined all the same.
    assert row(value, "h1", "data ports")["mark"] == row(value, "h3", "data ports")["mark"] == "ok"


def test_an_unknown_name_is_told(lab: Site) -> None:
    value = doctor(lab, hosts="h1,nosuch")
    assert found(value, "bad") == [("nosuch", "name")]


def test_no_python_is_told(lab: Site) -> None:
    spoil(lab, "rm -f /usr/bin/python3* /usr/local/bin/python3*")
    value = doctor(lab)
    assert ("h2", "agent") in found(value, "bad")
    assert row(value, "h2", "agent")["fix"]


def test_modules_that_servers_need_are_asked_for_with_their_interpreter(lab: Site) -> None:
    done = lab.distrun("doctor", "--hosts", "h1", "--json", *TIMES, cwd=ROOT)
    assert done.code == 3
    assert "pip install numpy pyzmq" in row(json.loads(done.out), "h1", "server python")["fix"]


def test_a_folder_that_is_not_there_proposes_to_copy(lab: Site) -> None:
    done = lab.distrun("doctor", "--hosts", "h1,h2", "--json", "--no-servers", *TIMES)
    assert done.code == 3
    value = json.loads(done.out)
    assert found(value, "bad") == [("h1", "folder"), ("h2", "folder")]
    assert "--sync-dst-dir" in row(value, "h1", "folder")["fix"]
    assert doctor(lab, "--sync-dst-dir", "~/job")["exit_code"] == 0


def test_what_the_hosts_file_says_of_a_host_is_looked_at(lab: Site) -> None:
    given = lab.hosts_file("h1", "h2 iface=nosuch0", "h3 workdir=/nope")
    words = ("doctor", "-H", given, "--json", "--no-servers", *TIMES)
    for more in ((), ("--sync-dst-dir", "~/job")):
        value = json.loads(lab.distrun(*words, *more, cwd=ROOT).out)
        assert found(value, "bad") == [("h2", "address"), ("h3", "folder")]
        assert "nosuch0" in row(value, "h2", "address")["text"]
        assert "/nope" in row(value, "h3", "folder")["text"]


def test_a_full_disk_is_told(lab: Site) -> None:
    lab["h2"].disk(1, "/home")
    value = doctor(lab, "--sync-dst-dir", "/home/job")
    assert found(value, "bad") == [("h2", "sync folder")]


def test_a_shell_that_prints_and_a_missing_rsync_are_faults_where_files_are_copied(lab: Site) -> None:
    spoil(lab, "echo 'echo welcome' >> /root/.bashrc; rm -f /usr/bin/rsync /usr/local/bin/rsync")
    value = doctor(lab)
    assert {check for host, check in found(value, "warn") if host == "h2"} >= {"shell", "rsync"}
    assert "welcome" in row(value, "h2", "shell")["text"]
    copied = doctor(lab, "--sync-dst-dir", "~/job")
    assert set(found(copied, "bad")) == {("h2", "shell"), ("h2", "rsync")}


def test_data_ports_that_are_closed_between_two_hosts_are_named(lab: Site) -> None:
    lab["h2"].drop("h1")
    value = doctor(lab)
    assert found(value, "bad") == [("h1", "data ports"), ("h2", "data ports")]
    assert "h2 cannot reach %s" % lab["h1"].address in row(value, "h1", "data ports")["text"]
    assert "h1 cannot reach %s" % lab["h2"].address in row(value, "h2", "data ports")["text"]
    assert "firewall" in row(value, "h2", "data ports")["fix"]


def test_ports_come_from_the_range_that_is_given(lab: Site) -> None:
    lab["h2"].reject(41234)
    value = doctor(lab, "--port-range", "41234-41234")
    assert found(value, "bad") == [("h2", "data ports")]
    assert "41234" in row(value, "h2", "data ports")["text"]
    assert doctor(lab, "--port-range", "41235-41240")["exit_code"] == 0


def test_an_interface_that_only_some_have_is_told_where_it_is_missing(lab: Site) -> None:
    assert doctor(lab, "--interface", "eth1")["exit_code"] == 0
    value = doctor(lab, "--interface", "ib0")
    assert [each for each in found(value, "bad") if each[1] == "address"] == [
        (h, "address") for h in ("h1", "h2", "h3")
    ]
    assert "eth0" in row(value, "h1", "address")["text"]
