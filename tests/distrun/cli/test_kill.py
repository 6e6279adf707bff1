"""What hosts are asked to end, and how long that may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from distrun.cli import kill
from distrun.fleet.questions import HostJob


class Asked:
    """Remembers what each host was asked for."""

    def __init__(self) -> None:
        self.args: dict[str, Mapping[str, Any]] = {}
        self.limit_s = 0.0

    def ask(
        self, what: str, args: Callable[[str], Mapping[str, Any]], limit_s: float, hosts: Sequence[str]
    ) -> dict[str, Any]:
        self.args, self.limit_s = {host: args(host) for host in hosts}, limit_s
        return {}


def job(host: str, name: str, grace_s: float | None) -> HostJob:
    return HostJob(host, name, "dead", "dead", (), grace_s=grace_s)


JOBS = [job("h1", "one", 60.0), job("h1", "two", None), job("h2", "one", 1.0)]


@pytest.mark.parametrize(("grace_s", "least_s"), [(None, 2 * 70.0), (2.0, 2 * 4.0)])
def test_jobs_end_within_their_own_grace_time_unless_another_is_given(grace_s: float | None, least_s: float) -> None:
    fleet = Asked()
    kill.end_jobs(fleet, JOBS, grace_s)  # type: ignore[arg-type]
    more = {} if grace_s is None else {"grace_s": grace_s}
    assert fleet.args == {"h1": {"jobs": ["one", "two"], **more}, "h2": {"jobs": ["one"], **more}}
    assert fleet.limit_s == least_s + 2 * kill.SLACK_S
