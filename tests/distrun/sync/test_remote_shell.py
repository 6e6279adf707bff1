"""Which names are one host, and whether a password is asked for."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import pytest
from slowness import scaled

from distrun.ssh import failure, resolve
from distrun.ssh.ask import Abort
from distrun.ssh.resolve import Target
from distrun.sync import remote_shell
from distrun.sync.remote_shell import distinct_hosts

LIMIT_S = 60.0


def test_names_of_one_host_are_one_group_in_the_order_of_the_hosts() -> None:
    targets = {name: Target(name) for name in ("a", "b", "a2", "c")}
    assert distinct_hosts(targets, lambda target: target.host[0]) == [("a", "a2"), ("b",), ("c",)]


def test_a_name_that_cannot_be_looked_up_in_time_is_a_host_of_its_own() -> None:
    silent = threading.Event()
    threads = []

    def look(target: Target) -> str:
        if target.host.startswith("slow"):
            threads.append(threading.current_thread())
            silent.wait(scaled(LIMIT_S))
        return "same"

    targets = {name: Target(name) for name in ("a", "slow1", "b", "slow2")}
    assert distinct_hosts(targets, look, limit_s=2.0) == [("a", "b"), ("slow1",), ("slow2",)]
    assert all(thread.daemon for thread in threads)
    silent.set()


def test_who_cancels_does_not_wait_for_names() -> None:
    silent, cancelled = threading.Event(), threading.Event()

    def look(target: Target) -> str:
        cancelled.set()
        silent.wait(scaled(LIMIT_S))
        return "same"

    found = distinct_hosts({"a": Target("a")}, look, limit_s=LIMIT_S, is_cancelled=cancelled.is_set)
    assert found == [("a",)]
    assert not silent.is_set()
    silent.set()


@pytest.mark.parametrize(("takes_password", "asked"), [(True, ["Password of me@d1: "]), (False, [])])
def test_a_password_is_asked_for_where_the_host_takes_one_whatever_the_failure_says(
    monkeypatch: pytest.MonkeyPatch, takes_password: bool, asked: list[str]
) -> None:
    found = SimpleNamespace(
        jump=(), proxy_command="", identities=(), asks_passwords=True, user="me", where=failure.Where("d1", user="me")
    )
    monkeypatch.setattr(resolve, "resolve", lambda target: found)
    monkeypatch.setattr(resolve, "shell", lambda found, named: ["ssh"])
    monkeypatch.setattr(shutil, "which", lambda name: name)
    prompts: list[str] = []

    class Typist:
        def recall(self, about: str) -> None:
            return None

        def ask(self, about: str, prompt: str, *rest: object) -> None:
            prompts.append(prompt)

    shells = remote_shell.SshShells(Typist(), remote_shell.Helpers(), Abort(), may_ask=True)  # type: ignore[arg-type]
    attempts = shells(Target("d1"))
    next(attempts)
    words = "no password" if not takes_password else "wording that is new"
    with pytest.raises(StopIteration):
        attempts.send(failure.SshFailure(failure.AUTH, words, takes_password=takes_password))
    assert prompts == asked
