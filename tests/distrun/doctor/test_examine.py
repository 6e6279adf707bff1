"""What each host is asked, as a launch would use it."""

from __future__ import annotations

import pytest

from distrun.backends.ssh import Ssh
from distrun.cli.common import hosts_for
from distrun.doctor.checks import DoctorRequest
from distrun.doctor.examine import questions
from distrun.hosts.parse import parse
from distrun_runtime.contract.plan import Host


def hosts(text: str) -> list[Host]:
    return hosts_for(parse(text, "hosts"), Ssh(), {})


@pytest.mark.parametrize(
    ("line", "request_", "expected"),
    [
        ("h1 iface=ib0", DoctorRequest(), {"interface": "ib0"}),
        ("h1 iface=ib0", DoctorRequest(interface="eth0", subnet="10.0.0.0/8"), {"interface": "ib0"}),
        ("h1", DoctorRequest(interface="eth0"), {"interface": "eth0"}),
        ("h1", DoctorRequest(subnet="10.0.0.0/8"), {"subnet": "10.0.0.0/8"}),
        ("h1 addr=10.0.0.1", DoctorRequest(interface="eth0"), {"address": "10.0.0.1", "interface": "eth0"}),
        ("h1 workdir=/w", DoctorRequest(cwd="/here", workdirs={"h1": "/w"}), {"cwd": "/w"}),
        ("h1", DoctorRequest(cwd="/here", workdirs={"h1": ""}), {"cwd": "/here"}),
        ("h1", DoctorRequest(dst="/d", workdirs={"h1": "/w"}), {"dst": "/d", "cwd": "/w"}),
    ],
)
def test_a_host_is_asked_for_what_a_launch_would_need(
    line: str, request_: DoctorRequest, expected: dict[str, str]
) -> None:
    assert questions("h1", hosts(line), request_) == expected


def test_the_address_is_the_one_toward_another_host() -> None:
    assert questions("h1", hosts("h1\nh2 addr=10.0.0.2\n"), DoctorRequest()) == {"toward": "10.0.0.2"}
