"""Every class of fault that the doctor knows, from facts of our own making."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from distrun.doctor import checks
from distrun.doctor.checks import BAD, OK, WARN, CheckRow, DoctorRequest, ExaminedHost, Ways
from distrun_runtime.coordinator.failures import Problem

PLACE = {
    "path": "/x",
    "exists": True,
    "is_folder": True,
    "near": "/x",
    "writable": True,
    "free": 9 << 30,
    "size": 9 << 31,
}
VENV = "/data/me/distrun/servers/python3.11-x86_64"
INSTALL = "/usr/bin/python3 -m venv ~/venv && ~/venv/bin/pip install pyzmq"
FACTS: dict[str, Any] = {
    "user": "me",
    "uid": 1000,
    "debian": True,
    "activation": {"error": ""},
    "agent_python": {"version": "3.9.2", "path": "/usr/bin/python3"},
    "python": {
        "version": "3.11.2",
        "path": "/usr/bin/python3",
        "is_own": False,
        "lacks": ["pip"],
        "numpy": "2.0",
        "zmq": "27.0",
        "place": VENV,
        "environment": {},
        "install": "",
    },
    "rsync": {"version": "rsync  version 3.2.7  protocol version 31", "error": ""},
    "folders": {"cwd": PLACE, "dst": {**PLACE, "fault": "", "fix": ""}},
    "tmp": {**PLACE, "path": "/tmp"},
    "limits": {"nofile": [65536, 65536], "memlock": [None, None]},
    "shm": {"free": 4 << 30, "size": 8 << 30},
    "logind": {"kill_user_processes": None, "linger": False},
    "network": {
        "interfaces": [["lo", "127.0.0.1", 8], ["eth0", "10.0.0.3", 24]],
        "address": "10.0.0.3",
        "error": "",
    },
    "gpus": {"how": "nvml", "driver": "550", "gpus": [{"number": 0, "name": "X"}], "error": "", "visible": None},
    "loose": [],
}
NO_GPU: dict[str, Any] = {"how": "", "driver": "", "gpus": [], "error": "", "visible": None}
NO_ZMQ: dict[str, Any] = {"python__zmq": "", "python__zmq_error": "No module named 'zmq'", "python__install": INSTALL}
WAYS = Ways()
REQUEST = DoctorRequest(count=2)
DST = DoctorRequest(dst="/x", count=2)


def facts(**changes: Any) -> dict[str, Any]:
    """The facts of a host in order, but for `a__b=value`."""
    made = copy.deepcopy(FACTS)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = made
        for step in path:
            place = place[step]
        place[last] = value
    return made


def rows(request_: DoctorRequest = REQUEST, **changes: Any) -> list[CheckRow]:
    return checks.check(ExaminedHost("gpu01", facts(**changes), is_met=True, offset_s=0.1), request_)


def only(mark: str, found: list[CheckRow]) -> CheckRow:
    (row,) = [each for each in found if each.mark == mark]
    return row


def test_a_host_in_order_has_no_fault_and_no_remark() -> None:
    for request_ in (REQUEST, DST):
        assert {row.mark for row in rows(request_)} == {OK}
    assert [row.check for row in rows()] == [
        "reach",
        "python",
        "server python",
        "rsync",
        "folder",
        "temporary files",
        "clock",
        "limits",
        "shared memory",
        "logout",
        "address",
        "GPUs",
    ]


@pytest.mark.parametrize("request_", [REQUEST, DST])
def test_a_folder_that_the_hosts_file_names_is_looked_at_whatever_is_copied(request_: DoctorRequest) -> None:
    missing = facts(folders__cwd={**PLACE, "path": "/w", "exists": False})
    request_ = dataclasses.replace(request_, workdirs={"gpu01": "/w"})
    row = only(BAD, checks.check(ExaminedHost("gpu01", missing, is_met=True, offset_s=0.1), request_))
    assert (row.check, row.text) == ("folder", "/w does not exist")
    assert "mkdir -p /w" in row.fix_text(WAYS)
    assert "sync" not in row.fix_text(WAYS)


@pytest.mark.parametrize(
    ("kind", "check", "passed"),
    [
        ("dns", "name", ""),
        ("refused", "connection", "name"),
        ("timeout", "connection", "name"),
        ("unreachable", "connection", "name"),
        ("hostkey", "host key", "name, connection"),
        ("auth", "login", "name, connection, host key"),
        ("password", "login", "name, connection, host key"),
        ("python", "agent", "name, connection, host key, login"),
    ],
)
def test_a_host_that_cannot_be_reached_says_how_far_we_came(kind: str, check: str, passed: str) -> None:
    found = checks.check(ExaminedHost("gpu01", problem=Problem("gpu01", kind, "why", "do this")), REQUEST)
    assert found[-1] == CheckRow("gpu01", check, BAD, "why", "do this")
    assert [row.text for row in found[:-1]] == ([passed] if passed else [])


@pytest.mark.parametrize("kind", [*(kind for _, kinds in checks.STEPS for kind in kinds), "other"])
def test_every_problem_is_a_fault_with_something_to_type(kind: str) -> None:
    row = checks.check(ExaminedHost("gpu01", problem=Problem("gpu01", kind, "why")), REQUEST)[-1]
    assert row.mark == BAD
    assert "gpu01" in row.fix_text(WAYS)


def test_an_agent_that_was_there_and_did_not_answer_is_no_matter_of_reaching() -> None:
    found = checks.check(ExaminedHost("gpu01", problem=Problem("gpu01", "timeout", "late"), is_met=True), REQUEST)
    assert [(row.check, row.mark) for row in found] == [("reach", OK), ("agent", BAD)]


@pytest.mark.parametrize(
    ("changes", "check", "text", "fix"),
    [
        ({"agent_python__version": "3.7.1"}, "python", "older than 3.8", "python=PATH"),
        ({"python": {"error": "python3: No such file"}}, "server python", "No such file", "--python PATH"),
        ({"python__version": "3.9.9"}, "server python", "3.10 or newer", "--python PATH"),
        (
            NO_ZMQ,
            "server python",
            "No module named 'zmq'",
            "for servers: distrun doctor --fix\nfor servers and workers: ",
        ),
        ({"folders__cwd": {**PLACE, "exists": False}}, "folder", "/x does not exist", "--sync-dst-dir"),
        ({"folders__cwd__free": 1 << 20}, "folder", "1.0 MiB free", "ssh gpu01 'df -h /x'"),
        ({"tmp__writable": False}, "temporary files", "/x cannot", "chmod 1777"),
        ({"network__error": "no interface 'ib0'"}, "address", "no interface 'ib0'", "--interface"),
        ({"network__address": "127.0.0.1"}, "address", "no other host can use it", "--interface"),
        ({"network__address": "10.9.9.9"}, "address", "on none of lo, eth0", "addr="),
    ],
)
def test_a_fault_says_how_to_fix_it(changes: dict[str, Any], check: str, text: str, fix: str) -> None:
    row = only(BAD, rows(**changes))
    assert row.check == check
    assert text.replace("/x cannot", "/tmp cannot") in row.text
    assert fix in row.fix_text(WAYS)


@pytest.mark.parametrize(
    ("changes", "check", "text", "fix"),
    [
        ({"rsync": {"version": "", "error": "rsync: No such file"}}, "rsync", "No such file", "install -y rsync"),
        ({"limits__nofile": [1024, 4096]}, "limits", "1024 open files", "limits.d"),
        ({"shm": {"free": 1, "size": 64 << 20}}, "shared memory", "64.0 MiB only", "shm-size"),
        ({"shm": {"free": None, "size": None}}, "shared memory", "no /dev/shm", "mount"),
        ({"logind__kill_user_processes": True}, "logout", "KillUserProcesses", "enable-linger me"),
        (
            {"gpus": {"how": "", "gpus": [], "error": "driver mismatch", "visible": None}},
            "GPUs",
            "driver mismatch",
            "nvidia-smi",
        ),
        ({"loose": ["/home/me"]}, "permissions", "others may write /home/me", "chmod go-w /home/me"),
        ({"folders__cwd__free": 1 << 29}, "folder", "512.0 MiB free", "df -h"),
    ],
)
def test_a_remark_is_no_fault(changes: dict[str, Any], check: str, text: str, fix: str) -> None:
    found = rows(**changes)
    row = only(WARN, found)
    assert (row.check, [each for each in found if each.mark == BAD]) == (check, [])
    assert text in row.text
    assert fix in row.fix_text(WAYS)


def test_what_copying_files_needs_is_a_fault_only_if_files_are_copied() -> None:
    missing = {"rsync": {"version": "", "error": "none"}}
    assert only(BAD, rows(DST, **missing)).check == "rsync"
    loud = ExaminedHost("gpu01", facts(), is_met=True, noise="its shell printed before the agent: hi")
    assert only(WARN, checks.check(loud, REQUEST)).check == "shell"
    assert only(BAD, checks.check(loud, DST)).check == "shell"


def test_a_shell_that_prints_is_quieted_in_its_own_file() -> None:
    for shell, file in (("/bin/bash", "~/.bashrc"), ("/bin/tcsh", "~/.tcshrc"), ("", "start-up files")):
        loud = ExaminedHost("gpu01", facts(shell=shell), is_met=True, noise="its shell printed before the agent: hi")
        assert file in only(BAD, checks.check(loud, DST)).fix


def test_the_folder_of_copies_need_not_be_there_but_must_be_possible() -> None:
    new = {**PLACE, "exists": False, "near": "/", "fault": "", "fix": ""}
    assert [row.text for row in rows(DST, folders__dst=new) if row.check == "sync folder"] == [
        "/x can be made, 9.0 GiB free"
    ]
    fixed = only(BAD, rows(DST, folders__dst={**new, "writable": False})).fix_text(WAYS)
    assert fixed.endswith("ssh -t gpu01 'sudo mkdir -p /x && sudo chown $(id -u) /x'")
    fixed = only(BAD, rows(DST, folders__dst={**new, "is_folder": False})).fix_text(WAYS)
    assert fixed.endswith("ssh gpu01 'ls -l /'")


@pytest.mark.parametrize(("offset", "mark"), [(1.9, OK), (-1.9, OK), (2.1, BAD), (-90.0, BAD)])
def test_a_clock_may_be_two_seconds_off(offset: float, mark: str) -> None:
    found = checks.check(ExaminedHost("gpu01", facts(), is_met=True, offset_s=offset), REQUEST)
    assert [row.mark for row in found if row.check == "clock"] == [mark]


def test_servers_are_not_asked_for_when_there_are_none() -> None:
    found = rows(DoctorRequest(needs_servers=False, count=2), python={"error": "none"})
    assert {row.mark for row in found} == {OK}


def test_loopback_is_good_enough_for_one_host() -> None:
    assert {row.mark for row in rows(DoctorRequest(count=1), network__address="127.0.0.1")} == {OK}


def test_hosts_that_differ_are_remarked() -> None:
    same = [ExaminedHost(name, facts(network__address="10.0.0.%d" % n)) for n, name in enumerate(("h1", "h2", "h3"))]
    assert checks.between(same, REQUEST) == []
    other = ExaminedHost("h4", facts(python__version="3.12.1", python__numpy="1.26", gpus__driver="535"))
    text = [row.text for row in checks.between([*same, other, ExaminedHost("h5")], REQUEST)]
    assert text == [
        "python differs: 3.11.2 on h[1-3]; 3.12.1 on h4",
        "numpy differs: 2.0 on h[1-3]; 1.26 on h4",
        "GPU drivers differ: 550 on h[1-3]; 535 on h4",
    ]


def test_one_address_of_two_hosts_is_remarked() -> None:
    (row,) = checks.between([ExaminedHost("h1", facts()), ExaminedHost("h2", facts())], REQUEST)
    assert (row.mark, row.text) == (WARN, "10.0.0.3 is the address of h[1-2]: are they one machine?")


def test_missing_modules_are_installed_into_an_environment_and_never_by_bare_pip() -> None:
    assert only(BAD, rows(**NO_ZMQ)).fix_text(WAYS).splitlines()[:-1] == [
        "for servers: distrun doctor --fix",
        "for servers and workers: ssh gpu01 '%s', then --activate venv:~/venv" % INSTALL,
    ]
    inside = "/data/me/v/bin/python -m pip install pyzmq"
    row = only(
        BAD, rows(DoctorRequest(doctor="distrun doctor -H h --python x"), **{**NO_ZMQ, "python__install": inside})
    )
    assert row.fix_text(WAYS).splitlines()[:-1] == [
        "for servers: distrun doctor -H h --python x --fix",
        "for servers and workers: ssh gpu01 '%s'" % inside,
    ]


@pytest.mark.parametrize("changes", [NO_ZMQ, {"python": {"error": "no such file"}}, {"python__version": "3.9.9"}])
def test_a_python_that_servers_cannot_use_is_none_of_a_job_without_servers(changes: dict[str, Any]) -> None:
    row = only(BAD, rows(DoctorRequest(doctor="distrun doctor -H h"), **changes))
    told = "if the command does not use the store:"
    assert row.fix_text(WAYS).splitlines()[-1] == f"{told} distrun doctor -H h --no-servers, then launch with -s 0"


@pytest.mark.parametrize(("uid", "sudo"), [(1000, "sudo "), (0, "")])
def test_debian_without_venv_gets_its_package_first(uid: int, sudo: str) -> None:
    row = only(BAD, rows(**{**NO_ZMQ, "python__lacks": ["ensurepip"], "python__install": ""}, uid=uid))
    apt = "%sapt-get update && %sapt-get install -y python3.11-venv" % (sudo, sudo)
    asks = "-t " if sudo else ""  # sudo asks for a password
    assert row.fix_text(WAYS).splitlines()[:-1] == ["ssh %sgpu01 '%s'" % (asks, apt), "then: distrun doctor --fix"]


def test_what_is_not_debian_is_not_told_of_its_packages() -> None:
    row = only(BAD, rows(**{**NO_ZMQ, "python__lacks": ["ensurepip"], "python__install": ""}, debian=False))
    assert row.fix_text(WAYS).splitlines()[:-1] == ["for servers: distrun doctor --fix"]


def test_an_environment_for_servers_makes_up_for_missing_modules() -> None:
    there = {"version": "3.11.2", "path": VENV + "/bin/python", "numpy": "2.1", "zmq": "27.1"}
    found = rows(**NO_ZMQ, python__environment=there)
    assert {row.mark for row in found} == {OK}
    (row,) = [row for row in found if row.check == "server python"]
    assert row.text == "3.11.2 /usr/bin/python3: no zmq; servers use 3.11.2 %s/bin/python, numpy 2.1, zmq 27.1" % VENV


def test_an_activation_that_fails_is_a_fault_unless_it_may_come_with_the_files() -> None:
    broken = {"activation__error": "activation on gpu01 failed"}
    text = "source x/bin/activate"
    assert [row.check for row in rows(DoctorRequest(activate=text)) if row.check == "activation"] == ["activation"]
    row = only(BAD, rows(DoctorRequest(activate=text), **broken))
    assert (row.check, row.text) == ("activation", "activation on gpu01 failed")
    assert "ssh -t gpu01 'bash -l'" in row.fix_text(WAYS)
    later = DoctorRequest(activate=text, dst="/x", is_activated_later=True)
    assert "may come with the files" in only(WARN, rows(later, **broken)).text


def test_root_is_not_told_to_use_sudo() -> None:
    wrong = {"tmp__writable": False, "logind__kill_user_processes": True, "shm": {"free": None, "size": None}}
    assert "sudo" in "".join(row.fix_text(WAYS) for row in rows(**wrong))
    assert "sudo" not in "".join(row.fix_text(WAYS) for row in rows(**wrong, uid=0))


def test_gpus_that_the_hosts_file_says_and_the_host_has_not_are_a_fault() -> None:
    said = dataclasses.replace(REQUEST, gpus={"gpu01": "2"}, where={"gpu01": "hosts:7"})
    row = only("bad", rows(said))
    assert row.text == "gpus=2 for gpu01 (hosts:7), but there is 1 GPU (0, NVIDIA's driver 550)"
    assert "hosts file" in row.fix
    unknown = only("warn", rows(said, gpus=NO_GPU))
    assert unknown.text.startswith("gpus=2 cannot be checked: neither the library of NVIDIA's driver nor nvidia-smi")
    here = [row.text for row in rows(gpus__visible="0") if row.check == "GPUs"]
    assert here == ["1 x X; driver 550; CUDA_VISIBLE_DEVICES=0"]
