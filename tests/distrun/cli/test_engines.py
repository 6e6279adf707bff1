"""What commands other than `launch` say of an engine."""

from __future__ import annotations

from collections.abc import Sequence

from folderqueue import FolderQueue

from distrun.backends.engine import CheckResult, EngineError
from distrun.backends.queue import QueueBackend
from distrun.cli.doctor import engine_rows


class Examined(FolderQueue):
    """An engine that finds what a test says."""

    def __init__(self, *findings: CheckResult) -> None:
        self.findings = findings

    def examine(self) -> Sequence[CheckResult]:
        if not self.findings:
            raise EngineError("kubectl says: connection refused", "kubectl cluster-info")
        return self.findings


def rows(*findings: CheckResult) -> list[tuple[str, str, str]]:
    return [(row.mark, row.text, row.fix) for row in engine_rows(QueueBackend(Examined(*findings)))[:-1]]


def test_a_fix_is_shown_only_of_what_is_missing() -> None:
    there, missing = CheckResult(True, "controller: up", "ask"), CheckResult(False, "controller: down", "ask")
    assert rows(there, missing) == [("ok", "controller: up", ""), ("bad", "controller: down", "ask")]
    assert rows(CheckResult(False, "no queue")) == [("bad", "no queue", "see docs/folderqueue.md")]


def test_an_engine_that_does_not_answer_is_a_finding() -> None:
    assert rows() == [("bad", "kubectl says: connection refused", "kubectl cluster-info")]
