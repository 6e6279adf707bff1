"""Collects which hosts cannot be used, until it is time to say so: all bad ones at once, not the first. Pure."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence

from distrun_runtime.contract import facts
from distrun_runtime.coordinator import verdict
from distrun_runtime.coordinator.outcome import Problem
from distrun_runtime.coordinator.verdict import Cause

WAIT_S = 15.0
"""How long after the first bad host the answers of the others are waited for."""
OTHER = "other"


class Preflight:
    """The hosts of one job that did not get ready."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._causes: List[Cause] = []
        self._problems: List[Problem] = []
        self._since = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong so far."""
        return not self._causes

    @property
    def until(self) -> Optional[float]:
        """When the others are not waited for any more; None: nothing is wrong."""
        return self._since + WAIT_S if self._causes else None

    def add(self, cause: Cause, now: float, kind: str = "", fix: str = "") -> None:
        """Note that `cause.host` is bad. `kind`, `fix`: as in `Problem`."""
        if not self._causes:
            self._since = now
        self._causes.append(cause)
        self._problems.append(Problem(cause.host, kind or OTHER, cause.detail, fix))

    def verdict(self, waiting: Sequence[str] = ()) -> Cause:
        """Return what ends the job: all bad hosts in one. `waiting`: hosts that have not answered yet."""
        order = {name: number for number, name in enumerate(self._hosts)}
        problems = tuple(sorted(self._problems, key=lambda problem: order[problem.host]))
        first = min(self._causes, key=lambda cause: cause.time)
        if any(cause.reason == facts.PREFLIGHT for cause in self._causes):
            first = verdict.unusable(problems, len(self._hosts), first.time, first.host)
        if waiting:
            first = dataclasses.replace(
                first, text="%s; not heard of by then: %s" % (first.text, verdict.listed(waiting))
            )
        return dataclasses.replace(first, problems=problems)
