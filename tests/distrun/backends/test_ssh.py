"""The ssh backend, as far as it needs no host."""

from __future__ import annotations

import pytest
from sample_plan import sample_plan

from distrun import hosts
from distrun.backends.ssh import Ssh
from distrun.errors import UsageError
from distrun.fleet import Fleet
from distrun.fleet.questions import HostAnswer
from distrun_runtime.contract.plan import Host, Reach
from distrun_runtime.coordinator.failures import Problem

PLAN = sample_plan()
HOSTS = (Host("d1", reach=Reach({"host": "d1", "port": "2222", "python": "/py"})), Host("d2"))


def test_hosts_have_to_be_named() -> None:
    for found in (None, hosts.named([])):
        with pytest.raises(UsageError, match="no hosts were named") as caught:
            Ssh().inventory(found)
        assert "-H FILE" in caught.value.hint
    named = hosts.named(["d1", "d2", "d1"])
    assert Ssh().inventory(named) is named


def test_how_a_host_is_reached_is_text_in_the_plan() -> None:
    spec = hosts.HostSpec("d1", user="me", port=2222)
    assert Ssh().reach(spec, {"strict": "yes", "connect_s": "3"}) == {
        "host": "d1",
        "user": "me",
        "port": "2222",
        "strict": "yes",
        "connect_s": "3",
    }
    assert Ssh().reach(hosts.HostSpec("d1"), {}) == {"host": "d1"}


def test_nothing_is_known_of_the_addresses_beforehand() -> None:
    assert Ssh().addresses(["d1"]) == {}


def test_the_dry_run_shows_an_ssh_command_for_each_host_and_nothing_of_the_users() -> None:
    rendered = Ssh().render(PLAN._replace(hosts=HOSTS, nonce="0123456789abcdef"))
    first, second = rendered.commands["d1"], rendered.commands["d2"]
    assert first[:3] == ("ssh", "-p", "2222")
    assert first[-3:-1] == ("--", "d1")
    assert first[-1].startswith("exec /bin/sh -c ")
    assert first[-1].endswith(
        " /py DISTRUN_JOB_ID=calm-otter-7f3 DISTRUN_JOB_NONCE=0123456789abcdef DISTRUN_HOST=d1 --"
    )
    assert second[-2] == "d2"
    text = " ".join(first + second)
    assert not any(value in text for task in PLAN.tasks for value in task.env.values() if len(value) > 3)


def test_a_sweep_says_for_each_host_what_ended_what_stayed_and_why_it_could_not_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def ask(self: Fleet, what: str, args: object, limit_s: float) -> dict[str, HostAnswer | Problem]:
        asked.append((what, args))
        value = {"ended": [[7, "sleep 1"]], "left": [[8, "dd"]]}
        return {"d1": HostAnswer(value), "d2": Problem("d2", "refused", "nothing listens")}

    monkeypatch.setattr(Fleet, "ask", ask)
    monkeypatch.setattr(Fleet, "__enter__", lambda self: self)
    monkeypatch.setattr(Fleet, "__exit__", lambda *_: None)
    found = Ssh().sweep(PLAN._replace(hosts=HOSTS), 0.5)
    assert asked == [("sweep", {"job": PLAN.job, "nonce": PLAN.nonce, "grace_s": 0.5})]
    assert found["d1"].lines() == ["ended pid 7 (sleep 1)", "pid 8 (dd) did not end"]
    assert found["d2"].problem == "nothing listens"
