"""The failure report: what followed from the first failure, then that failure itself: where, how, its last lines.

Of hosts that cannot be used it is a table: host, kind, what was found, what to type.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence

from distrun.formats import grouped, number_of
from distrun.hosts.ranges import generic
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.failures import Culprit, Outcome, Problem, TaskResult

TAIL_LINES = 20
"""Lines of a log that are shown, unless they end within a traceback."""
READ_LINES = 100
"""Lines from the end of a log among which its last traceback is looked for."""
TRACEBACK_LINES = 60
"""Lines of a traceback that are shown at most."""
_LINE_LIMIT = 1000
_NAME_LIMIT = 5
_COLUMN = 40

_SIGNALS = {
    "ABRT": "it aborted itself, as after a failed assertion",
    "BUS": "it accessed memory that does not exist, such as a truncated mapped file or a full /dev/shm",
    "FPE": "an arithmetic fault",
    "HUP": "its terminal was closed",
    "ILL": "its code does not fit this processor",
    "INT": "it was interrupted",
    "KILL": "it was killed, not by distrun; often the kernel's out-of-memory killer: see dmesg",
    "PIPE": "it wrote to a pipe whose reader has ended",
    "SEGV": "a segmentation fault",
    "TERM": "it was asked to end, not by distrun",
    "XCPU": "it used up its CPU time (ulimit -t)",
}
_CODES = {
    facts.EXIT_NOT_EXECUTABLE: "the command cannot be executed",
    facts.EXIT_NOT_FOUND: "the command was not found",
}
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_HOSTS = {
    facts.HOST_LOST: "was lost",
    facts.PREFLIGHT: "cannot be used",
    facts.SYNC: "did not get the files",
    facts.SUBMIT: "did not take the job",
    # An engine has said why it ended the place:
    **dict.fromkeys((facts.TIMEOUT, facts.TERMINATED, facts.TASK_FAILED), "was ended"),
}


def failure(outcome: Outcome, tail: Sequence[str] = (), log: str = "") -> str:
    """Return the report of a job that did not succeed, several lines without a final newline; "" if it succeeded.

    Arguments:
        outcome: how the job ended. `outcome.message` is its one line for `distrun: error: ...`.
        tail: the last lines of the culprit's log, as `JobFolder.tail(task, READ_LINES)` gives them.
        log: path of that log.
    """
    if outcome.reason == facts.SUCCEEDED:
        return ""
    lines: list[str] = _later(outcome)
    culprit = outcome.culprit
    if culprit is not None and culprit.task:
        lines.append(f"first failure: {culprit.task} on {culprit.host}: {_how(culprit)}")
        if culprit.consequence:
            lines.append(f"  It had lost {culprit.lost_peer}: {culprit.reason or 'no reason known'}")
        elif culprit.reason and culprit.reason not in outcome.message:
            lines.append(f"  {culprit.reason}")
        lines += _tail(tail, log)
    elif outcome.problems and (outcome.reason == facts.PREFLIGHT or len(outcome.problems) > 1):
        lines += _table(outcome.problems)
        lines.append("nothing was started on any host")
    elif culprit is not None:
        lines.append(f"first failure: {culprit.host or 'a host'} {_HOSTS.get(outcome.reason, 'did not start')}")
        if "\n" in culprit.reason:
            lines += ["    | " + _cut(line) for line in culprit.reason.splitlines()[-TAIL_LINES:]]
    if outcome.survivors:
        lines.append(f"may still run: {', '.join(map(str, outcome.survivors))}")
    if culprit is not None and culprit.task and outcome.job and tail:
        lines.append(f"to read all that it wrote: distrun logs {outcome.job} {culprit.task}")
    return "\n".join(lines)


def meaning(code: int | None, signal: str | None) -> str:
    """Return what a code or signal usually means; empty where nothing can be said."""
    if signal is not None:
        return _SIGNALS.get(signal[3:] if signal.startswith("SIG") else signal, "")
    if code is not None and 0 < code - facts.SIGNAL_BASE < 65:
        try:
            return f"as a shell says of signal {signals.Signals(code - facts.SIGNAL_BASE).name[3:]}"
        except ValueError:
            return ""
    return _CODES.get(code or 0, "")


def _how(culprit: Culprit) -> str:
    if culprit.signal is not None:
        text = f"signal {culprit.signal}"
    elif culprit.code == 0:
        text = "exit code 0, while workers still ran"
    elif culprit.missing:
        text = "it ran, but did not answer the other tasks"
    elif culprit.code is None:
        text = "it said that it fails"
    else:
        text = f"exit code {culprit.code}"
    more = meaning(culprit.code, culprit.signal)
    return f"{text} ({more})" if more else text


def _tail(tail: Sequence[str], log: str) -> list[str]:
    if not tail:
        return [f"  It wrote nothing. Log: {log}"] if log else []
    last = excerpt(tail)
    head = f"  Its last line{'' if len(last) == 1 else 's'}"
    return [head + (f" (all of them: {log}):" if log else ":")] + ["    | " + _cut(line) for line in last]


def excerpt(lines: Sequence[str]) -> list[str]:
    """Return the last lines of a log: 20, or as many as its last traceback has, with what that came from.

    No side effects.
    """
    first = len(lines)
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith(_TRACEBACK):
            first = number
            above = [line for line in lines[:number] if line.strip()][-1:]
            if not above or above[0] not in _CHAINED:
                break
    shown = list(lines[min(first, max(0, len(lines) - TAIL_LINES)) :])
    left_out = len(shown) - TRACEBACK_LINES
    if left_out <= 0:
        return shown
    head = TRACEBACK_LINES - TAIL_LINES
    return [*shown[:head], f"[... {left_out} lines]", *shown[-TAIL_LINES:]]


def _table(problems: Sequence[Problem]) -> list[str]:
    """Return a row for each problem, what is the same on several hosts together: hosts, kind, what was found.

    Their own names in it make no difference; where there are several, HOST stands for them.
    """
    alike = grouped(
        ((each.kind, generic(each.host, each.text), generic(each.host, each.fix)), each) for each in problems
    )
    same: dict[tuple[str, str, str], list[str]] = {}
    for key, each in alike.items():
        equal = len({(problem.text, problem.fix) for problem in each}) == 1
        row = (each[0].kind, each[0].text, each[0].fix) if equal else key
        same[row] = [problem.host for problem in each]
    names = [", ".join(hosts) for hosts in same.values()]
    # A long list of hosts has a line to itself; the columns are for the others.
    first = max([len("host")] + [len(name) for name in names if len(name) <= _COLUMN])
    second = max([len("kind")] + [len(kind) for kind, _, _ in same])
    lines = [f"{'host':{first}}  {'kind':{second}}  what was found"]
    for name, (kind, text, fix) in zip(names, same, strict=True):
        if len(name) > first:
            lines.append(name)
            name = ""
        found = [_cut(line) for line in text.splitlines() if line.strip()][-TAIL_LINES:] or ["?"]
        lines.append(f"{name:{first}}  {kind:{second}}  {found[0]}")
        indent = " " * (first + second + 4)
        lines += [indent + line for line in found[1:]]
        lines += [indent + "-> " + line for line in fix.splitlines()]
    return lines


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_LIMIT else line[:_LINE_LIMIT] + " [...]"


def _later(outcome: Outcome) -> list[str]:
    first = outcome.culprit.task if outcome.culprit is not None else ""
    failed = [task for task in outcome.tasks if task.state == facts.FAILED and task.name != first]
    if not failed:
        return []
    named = facts.listed([f"{task.name} ({_short(task)})" for task in failed], _NAME_LIMIT)
    return [f"{number_of(len(failed), 'other task')} failed later: {named}"]


def _short(task: TaskResult) -> str:
    if task.lost_peer:
        return f"lost {task.lost_peer}"
    if task.signal is not None:
        return f"signal {task.signal}"
    return f"exit code {task.code}" if task.code is not None else task.reason
