"""`distrun doctor` over real hosts, each of them broken in its own way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wheels
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


def test_the_table_folds_hosts_and_ends_faults_with_how_to_fix_them(lab: Site) -> None:
    lab["h2"].reject(22)
    done = lab.distrun("doctor", "--hosts", "h1,h2,h3", *TIMES, "--no-servers", cwd=ROOT, env={"LC_ALL": "C.UTF-8"})
    assert done.code == 3
    lines = done.out.splitlines()
    assert any(line.split()[:3] == ["✓", "python", "h[1,3]"] for line in lines), done.out
    at = next(index for index, line in enumerate(lines) if line.startswith("✗"))
    assert lines[at].split()[1:3] == ["connection", "h2"]
    assert lines[at + 1].strip().startswith("fix:")
    assert lines[-1].startswith("1 problem on 1 of 3 hosts")


def test_marks_are_ascii_where_nothing_else_can_be_shown(lab: Site) -> None:
    env = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = lab.distrun("doctor", "--hosts", "h1", "--no-servers", cwd=ROOT, env=env)
    assert done.out.isascii()
    assert any(line.startswith("ok") for line in done.out.splitlines())


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


# What servers need

# Each worker adds its rank and 1 to a value, and sees the sum.
WORKER = """\
import os
import numpy as np
from distrun_runtime import kvstore
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(4))
kv.push("w", np.full(4, kv.rank + 1.0))
out = np.zeros(4)
kv.pull("w", out=out)
print("sum", out[0])
"""


def give_wheels(lab: Site, host: str) -> None:
    """Let pip on a host, which has no network, find numpy and pyzmq."""
    wheels.make(lab[host].root / "root" / "wheels")
    config = lab[host].root / "root" / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("[install]\nno-index = true\nfind-links = /root/wheels\n")


@pytest.fixture
def fresh(lab: Site) -> Iterator[Site]:
    """Hosts h1 and h2 keep nothing of this test, which has servers' modules installed there."""
    yield lab
    for name in ("h1", "h2"):
        lab[name].kill()
        lab[name].boot()


def test_fix_makes_what_servers_need_and_a_launch_then_uses_it(fresh: Site) -> None:
    lab = fresh
    for host in ("h1", "h2"):
        give_wheels(lab, host)
    hosts = lab.hosts_file("h1", "h2")
    launch = ("launch", "-H", hosts, "-n", "2", "-s", "2", "--python", "python3", "hostname")
    refused = lab.distrun(*launch, cwd=ROOT)
    assert refused.code == 3
    # First that servers may not be needed at all, then how to install.
    advice = [line.partition("-> ")[2] for line in refused.err.splitlines() if "-> " in line]
    assert advice[0] == "add -s 0 if the command does not use the store"
    assert advice[1] == "for servers: distrun doctor -H %s --python python3 --fix" % hosts
    assert advice[2].startswith("for servers and workers: ssh HOST '/usr/bin/python3 -m venv ~/venv && ")

    words = ("doctor", "-H", hosts, "--python", "python3", *TIMES)
    asked = lab.distrun(*words, "--fix", cwd=ROOT)
    assert asked.code == 2, "nobody can be asked"
    assert not (lab["h1"].root / "root/.local/share/distrun").exists()
    made = lab.distrun(*words, "--fix", "-y", cwd=ROOT)
    assert made.code == 0, made
    assert "made on h[1-2]: /root/.local/share/distrun/servers/python3." in made.out
    assert "h1: installing numpy" in made.err

    value = json.loads(lab.distrun(*words, "--json", cwd=ROOT).out)
    assert row(value, "h1", "server python")["mark"] == "ok"
    assert "no numpy, no zmq; servers use" in row(value, "h1", "server python")["text"]
    assert value["exit_code"] == 0
    again = lab.distrun(*words, "--fix", cwd=ROOT)
    assert (again.code, "nothing to make" in again.out) == (0, True)
    assert lab.distrun(*launch, cwd=ROOT).code == 0
    # The servers of the bundled store run by it, and workers by a Python of their own.
    (lab.work / "worker.py").write_text(WORKER)
    store = ("launch", "-v", "-H", hosts, "-n", "2", "-s", "2", "--python", "python3", "--sync-dst-dir", "~/job")
    done = lab.distrun(*store, sys.executable, "worker.py")
    assert (done.code, done.out.count("sum 3.0")) == (0, 2), done
    assert "h1: servers run by Python 3." in done.err
    assert "/root/.local/share/distrun/servers/python3." in done.err


def test_the_doctor_activates_what_a_launch_would(lab: Site) -> None:
    venv = sys.prefix
    value = json.loads(lab.distrun("doctor", "--hosts", "h1", "--json", "--activate", "venv:" + venv, *TIMES).out)
    assert row(value, "h1", "activation")["mark"] == "ok"
    assert row(value, "h1", "server python")["mark"] == "ok"
    assert venv in row(value, "h1", "server python")["text"]
    value = doctor(lab, "--activate", "venv:/nowhere")
    assert [each for each in found(value, "bad") if each[0] == "h1"] == [("h1", "activation")]
    assert "bash -l" in row(value, "h1", "activation")["fix"]


def test_fixes_go_the_way_that_was_typed(lab: Site) -> None:
    config = lab.home_folder / "config"
    config.write_text("Host one\n  HostName h1\n")
    done = lab.distrun("doctor", "--hosts", "one", "--ssh-config", str(config), "--json", *TIMES, cwd=ROOT)
    value = json.loads(done.out)
    fix = row(value, "one", "server python")["fix"]
    assert "distrun doctor --hosts one --ssh-config %s --connect-timeout 8 --fix" % config in fix
    assert "ssh -F %s one '" % config in fix
