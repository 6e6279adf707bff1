"""Grid Engine (SGE, Son of Grid Engine, Univa and Open Cluster Scheduler), through its own commands.

A job is one parallel job: `qsub -pe PE SLOTS` with a slot for each core of its tasks. Grid Engine runs the script
`templates/sge.sh` on the first host that it grants, and that starts an agent on every other one by `qrsh -inherit`, so
accounting and `qdel` reach all of them. A place is called as its host. Where there is no parallel environment that
allows `qrsh -inherit`, the job is an array: each task has its own place, called as the task's number. Nothing sees to
it that all of these start, so there is a limit of time for it.

The script may be read by every user of the host, so the secret is not in it. The script waits for the file in the
job's folder; and as that may not be shared, `look` writes the secret to the first host by `qrsh -inherit`.

Grid Engine is asked by `qstat -xml`, and after the job's end by `qacct`, which not every site lets users read.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.etree import ElementTree

from distrun.backends.engine import (
    ANSWER_S,
    ENDED,
    MARK,
    MIB,
    QUEUED,
    RUNNING,
    CheckResult,
    Engine,
    EngineError,
    Explanation,
    FoundJob,
    Grant,
    Handle,
    Preparation,
    QueueStatus,
    Script,
    Submission,
    check_known,
    execute,
    one_line,
    template,
    tries,
)
from distrun.errors import UsageError
from distrun.templates import fill
from distrun_runtime.contract import facts, process
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.plan import SERVER, WORKER

SCRIPT = "sge.sh"
NO_PE = "none"
"""`--pe none`: an array is wanted."""
MEMORY = "mem_free"
"""What `--worker-memory` asks for, unless the configuration file says `memory = 'NAME'`; every Grid Engine knows it."""
GPU = "gpu"
"""What `--worker-gpus` asks for, unless the configuration file says `gpu = 'NAME'`; sites define it themselves."""
ARRAY_START_S = 120.0
"""From the first task of an array that starts, the others may take so long."""
DELIVERY_S = 10.0
ACCOUNT_S = 2.0
"""How long `qacct` may take: it reads a file of all jobs that ever were."""
EXPLAIN_S = 2.5
"""How long the record of a job that has ended is waited for: some sites write it up to 15 s later."""
LOOKED_S = 5.0
"""A job may have run for so long before it was seen to run."""
REASON_S = 15.0
"""How long an answer to why a job waits is used: each takes the queue master some work."""
_FIND_MASTER = (
    "cat $SGE_ROOT/default/common/act_qmaster   says its host; there:  systemctl start gridengine-master   or  "
    "$SGE_ROOT/default/common/sgemaster start; if this is no submit host, there:  qconf -as THIS_HOST"
)
SHOWN = 3
"""How many reasons, and how many queues and hosts of each, are shown."""
CANCELLED = facts.EXIT_TERMINATED
NOTIFIED = facts.exit_code(None, "USR2")
"""How the script ends after USR2, by which `-notify` announces the end. An agent never ends so by itself."""


@dataclass(frozen=True)
class SgePreparation(Preparation):
    """What Grid Engine was asked before a job is submitted."""

    pe: str = "PE"
    """The parallel environment; NO_PE: the job is an array."""
    complexes: Mapping[str, str] = field(default_factory=dict)
    """Whether each resource is consumed; empty: no job asks for one."""


class SgeJob(NamedTuple):
    """What the handle of a job has to say of it."""

    is_array: bool = False
    tasks: int = 0
    slots: int = 0
    servers: int = 0
    time_s: float | None = None


class Sge(Engine):
    """The engine `sge`."""

    name = "sge"

    def __init__(self) -> None:
        self._secret = ""
        self._limit_s = ARRAY_START_S
        self._delivery: threading.Thread | None = None
        self._delivered = False
        self._undelivered = ""
        """Why the secret could not be written to the first host the last time that it was tried."""
        self._first_seen: dict[str, float] = {}
        """When the first task of an array ran (monotonic clock), by job."""
        self._running_since: dict[str, float] = {}
        """When a job was first seen to run (monotonic clock)."""
        self._deleted: set[str] = set()
        """Jobs that were seen being deleted."""
        self._hosts: dict[str, list[str]] = {}
        """The hosts on which a job was first seen to run, by job."""
        self._given_up: dict[str, Explanation] = {}
        """Why a job was deleted by `look`, by job."""
        self._reasons: dict[str, tuple[float, str]] = {}
        """Why a job waits, and when Grid Engine was asked (monotonic clock), by job."""

    def prepare(self, submission: Submission) -> SgePreparation:
        """Find the parallel environment and what the resources are called; have Grid Engine say whether it fits."""
        try:
            return self._found(submission)
        except EngineError:
            if not submission.is_dry:
                raise
            return SgePreparation(pe=submission.options.own.get("pe") or submission.options.config.get("pe", "PE"))

    def _found(self, submission: Submission) -> SgePreparation:
        options = submission.options
        wanted = options.own.get("pe") or options.config.get("pe", "")
        if options.queue:
            _check_listed("--queue", "queue", options.queue, _listed("-sql"))
        if options.project:
            _check_listed("--project", "project", options.project, _listed("-sprjl"))
        chosen = choose(_environments(wanted), wanted)
        asks = any(group.needs.memory or group.needs.gpus for group in submission.groups)
        found = SgePreparation(pe=chosen, complexes=parse_complexes(_ask("qconf", "-sc")) if asks else {})
        self._verify(submission, found)
        return found

    def _verify(self, submission: Submission, found: SgePreparation) -> None:
        """Have Grid Engine say whether the job could run if the cluster were empty (`-w v`)."""
        words = qsub(submission, found)
        refusal = _refusal(words)
        if refusal and "-l" in words:  # perhaps only because `-w v` ignores load values, such as mem_free
            refusal = _refusal(in_an_empty_cluster(words, _ask("qconf", "-sc"), _ask("qhost", "-F", may_fail=True)))
        if refusal:
            raise UsageError(
                f"Grid Engine: the job cannot run: {refusal}",
                "ask for less, or for another --queue or --pe; `qstat -f` and `qconf -spl` show what there is",
            )

    def render(self, submission: Submission) -> Script:
        """Return the script and the command of `qsub`. Pure but for the template."""
        place, secret = "env:DISTRUN_ENGINE_PLACE", "env:DISTRUN_ENGINE_SECRET"
        values = {
            "job": submission.job,
            "agent": shlex.join(submission.bootstrap.command(submission.python, place, secret)),
            "folder": shlex.quote(str(submission.folder)),
            "limit": f"{submission.bootstrap.limit_s:.0f}",
        }
        text = fill(template(SCRIPT, submission.options), values)
        return Script({SCRIPT: text}, ((*qsub(submission, submission.found), str(submission.folder / SCRIPT)),))

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Submit the job by `qsub`."""
        self._secret = submission.secret
        self._limit_s = submission.bootstrap.limit_s
        code, said = _run(script.commands[0])
        if code:
            raise _refused("qsub", code, said)
        number = parse_id(said)
        if not number:
            raise EngineError(
                f"qsub said no job number: {one_line(said)!r}",
                "name the real one by submit = ... in the [sge] section",
            )
        is_array, count = submission.found.pe == NO_PE, slots(submission)
        job = SgeJob(is_array, submission.tasks, count, submission.servers, submission.options.time_s)
        return Handle(self.name, number, job._asdict())

    def look(self, handle: Handle) -> QueueStatus:
        """Ask `qstat`. A job that could not be started is deleted; the secret is delivered when the job starts."""
        rows = _rows(handle.id, is_strict=True)
        if not rows:
            return self._ended(handle)
        if any("d" in row.state for row in rows):
            self._deleted.add(handle.id)
        if any("E" in row.state for row in rows):
            why = parse_errors(_ask("qstat", "-xml", "-j", handle.id, may_fail=True))
            return self._give_up(handle, f"in an error state (Eqw): {why or 'Grid Engine does not say why'}")
        running = [row for row in rows if row.host]
        job = SgeJob(**handle.more)
        is_parallel = not job.is_array
        hosts = [row.host for row in sorted(running, key=lambda row: not row.is_master)]
        known = self._hosts.get(handle.id)
        if known and (any("q" in row.state for row in rows) or (is_parallel and set(hosts) - set(known))):
            why = self._why(handle.id) or "Grid Engine does not say why"
            where = f"{known[0]} has not started it" if is_parallel else "a task was not started"
            return self._give_up(handle, f"{where}, and it went back to the queue ({why})")
        is_whole = is_parallel or len(running) >= job.tasks
        if not running or not (is_whole or handle.id in self._running_since):  # some tasks of an array end earlier
            return self._waiting(handle, running, rows)
        self._running_since.setdefault(handle.id, time.monotonic())
        self._hosts.setdefault(handle.id, hosts)
        found = grants(running, job)
        if self._secret and not self._delivered and is_parallel:
            self._deliver(handle.id, next((row.host for row in running if row.is_master), running[0].host))
        if handle.id in self._deleted and any(row.host in _unheard() for row in running):
            _run(("qdel", "-f", handle.id))  # if the user may; else it stays until the host is back
        # A host that is not heard of is not gone: its daemon may be started again, and jobs go on meanwhile.
        return QueueStatus(RUNNING, _condition(running) or ("" if self._delivered else self._undelivered), found)

    def _waiting(self, handle: Handle, running: Sequence[QstatRow], rows: Sequence[QstatRow]) -> QueueStatus:
        if running:
            count = f"{len(running)} of {SgeJob(**handle.more).tasks} array tasks have started"
            since = self._first_seen.setdefault(handle.id, time.monotonic())
            if time.monotonic() - since > self._limit_s:
                return self._give_up(
                    handle, f"only {count} within {self._limit_s:g} s; a parallel environment starts all or none (--pe)"
                )
            return QueueStatus(QUEUED, f"{count}; the others wait{self._because(handle.id)}")
        if all("h" in row.state for row in rows):
            return QueueStatus(QUEUED, f"on hold (state {rows[0].state}); `qrls {handle.id}` releases it")
        pending = parse_jobs(_ask("qstat", "-xml", "-r", "-u", "*", "-s", "p", may_fail=True), is_lenient=True)
        return QueueStatus(QUEUED, position(pending, handle.id) + self._because(handle.id))

    def _because(self, job: str) -> str:
        why = self._why(job)
        return f" ({why})" if why else ""

    def _why(self, job: str) -> str:
        """Return why a job waits; empty if Grid Engine does not say."""
        asked, why = self._reasons.get(job, (0.0, ""))
        if not why or time.monotonic() > asked + REASON_S:
            said = _ask("qstat", "-xml", "-j", job, may_fail=True)
            # The scheduler's own words are there only after it has looked at the job, and sites turn them off.
            told = parse_messages(said, job) or parse_verdict(_ask("qalter", "-w", "p", job, may_fail=True))
            errors = parse_errors(said)
            needs_states = "not available" in str(told) or (errors and not told)
            states = parse_states(_ask("qstat", "-xml", "-f", may_fail=True)) if needs_states else {}
            why = reasons(told, errors, states)
            self._reasons[job] = (time.monotonic(), why)
        return why

    def _give_up(self, handle: Handle, why: str) -> QueueStatus:
        self.cancel(handle)
        self._given_up[handle.id] = Explanation(facts.EXIT_START_FAILED, why)
        return QueueStatus(ENDED, why)

    def _deliver(self, job: str, head: str) -> None:
        """Write the secret to a file of the job's own on its first host, in a thread, unless that is under way.

        That it cannot be written is no error: the script may have found the secret in the job's folder.
        """
        if self._delivery is None or not self._delivery.is_alive():
            self._delivery = threading.Thread(target=self._try_to_deliver, args=(job, head), name="secret", daemon=True)
            self._delivery.start()

    def _try_to_deliver(self, job: str, head: str) -> None:
        # Renamed when it is whole: the script reads it as soon as it is there.
        text = 'umask 077\ncd "${TMP:-$TMPDIR}" && cat >distrun-new <<END && mv distrun-new distrun-secret\n%s\nEND\n'
        words = ("env", f"JOB_ID={job}", "SGE_TASK_ID=undefined", "qrsh", "-inherit", head, "/bin/sh")
        for _ in tries(DELIVERY_S):
            code, said = _run(words, text=text % self._secret, limit_s=DELIVERY_S, is_strict=False)
            self._delivered = code == 0
            if self._delivered:
                break
            # While the job is on its way to its hosts, they do not accept it.
            self._undelivered = f"qrsh -inherit {head}: {one_line(said)}"

    def cancel(self, handle: Handle) -> None:
        """Delete the job by `qdel`. `look` does so by force if one of its hosts is not heard of."""
        code, said = _run(("qdel", handle.id))
        if code and "does not exist" not in said:
            raise _refused(f"qdel {handle.id}", code, said)

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return what the accounting says of a job that has ended, else what is seen of one that ends."""
        if handle.id in self._given_up:
            return self._given_up[handle.id]
        job = SgeJob(**handle.more)
        limit_s = job.time_s or math.inf
        found = None
        for _ in tries(EXPLAIN_S):
            is_over = time.monotonic() - self._running_since.get(handle.id, math.inf) > limit_s - LOOKED_S
            rows = _rows(handle.id)
            if any("d" in row.state for row in rows):
                self._deleted.add(handle.id)
            found = explanation(_accounted(handle.id), job.is_array, place)
            # What ended at the limit may have no other record than that of a host which began later.
            if found is not None and not (found.code == CANCELLED and (is_over or (rows and limit_s < math.inf))):
                return found
            if handle.id in self._deleted:
                return Explanation(CANCELLED, "Grid Engine: the job was deleted from outside (qdel)")
            host = place if not job.is_array else next((r.host for r in rows if r.task == place), "")
            if host and host in _unheard():
                return Explanation(facts.EXIT_HOST_LOST, f"Grid Engine does not hear of {host} any more")
        return _time_limit(limit_s) if is_over else found

    def _ended(self, handle: Handle) -> QueueStatus:
        """Return how a job stands that Grid Engine does not list any more."""
        records = _accounted(handle.id)
        found = explanation(records, SgeJob(**handle.more).is_array, "")
        has_run = bool(records) or handle.id in self._running_since
        is_deleted = handle.id in self._deleted or (not has_run and _was_deleted_in_queue(handle.id))
        if found is None and is_deleted:
            found = Explanation(CANCELLED, "Grid Engine: the job was deleted from outside (qdel)")
        if found is not None:
            is_start = found.code == facts.EXIT_START_FAILED
            return QueueStatus(ENDED, found.text.replace("Grid Engine: ", ""), why=None if is_start else found)
        codes = [each.code for each in records if each.code]
        if facts.EXIT_NOT_FOUND in codes:
            text = "its script ended with exit code 127: a host has no python3 (--python names another)"
        elif facts.EXIT_START_FAILED in codes:
            text = "its script ended with exit code 6: an agent did not reach the coordinator; see engine/agents.log"
        elif codes:
            text = f"its script ended with exit code {codes[0]}"
        else:
            text = "" if has_run else "it was deleted (qdel), or ended at once; Grid Engine has no record of it"
        return QueueStatus(ENDED, text)

    def find(self) -> Sequence[FoundJob]:
        """Return this user's jobs whose names begin as markers do."""
        found: dict[str, FoundJob] = {}
        for row in parse_jobs(_ask("qstat", "-xml", "-r", "-u", _user())):
            if row.name.startswith(MARK):
                handle = Handle(self.name, row.id, SgeJob(bool(row.task))._asdict())
                found.setdefault(row.id, FoundJob(handle, row.name, row.state))
        return tuple(found.values())

    def examine(self) -> Iterator[CheckResult]:
        """Look for the commands, the queue master, parallel environments and the accounting."""
        lacks = [name for name in ("qsub", "qstat", "qdel", "qconf", "qrsh") if shutil.which(name) is None]
        if lacks:
            fix = ". $SGE_ROOT/default/common/settings.sh   or install gridengine-client"
            yield CheckResult(False, f"commands of Grid Engine: not found: {' '.join(lacks)}", fix)
            return
        version = _run(("qstat", "-help"))[1].partition("\n")[0]
        yield CheckResult(True, f"commands of Grid Engine: {version}")
        code, said = _run(("qconf", "-sss"))
        if code:
            yield CheckResult(False, f"the queue master does not answer: {one_line(said)}", _FIND_MASTER)
            return
        yield CheckResult(True, f"the queue master answers; the scheduler runs on {said.strip()}")
        try:
            wanted = self.options.own.get("pe") or self.options.config.get("pe", "")
            chosen = choose(_environments(wanted), wanted)
            if chosen == NO_PE:
                fix = "jobs are arrays, and need a shared job folder; ask for one with control_slaves TRUE"
                yield CheckResult(False, "no parallel environment allows qrsh -inherit", fix)
            else:
                yield CheckResult(True, f"parallel environment: {chosen}")
        except UsageError as err:
            yield CheckResult(True, f"{err}; {err.hint}")
        code, said = _run(("qacct", "-o", _user(), "-d", "1"))
        if code and "no jobs running since startup" not in said:
            then = "why a job ended is known only as far as agents tell; ask for access to the accounting file"
            yield CheckResult(True, f"no accounting (qacct): {one_line(said)}; {then}")
        else:
            yield CheckResult(True, "accounting: qacct answers")


# What is submitted. No side effects.


def qsub(submission: Submission, found: SgePreparation) -> tuple[str, ...]:
    """Return the command without the script.

    Raises:
        UsageError: resources that Grid Engine cannot be asked for so.
    """
    options = submission.options
    words = [options.config.get("submit", "qsub"), "-terse", "-N", submission.marker, "-S", "/bin/sh"]
    # The user's own defaults (.sge_request) may say otherwise. Folder and output must be there on every host.
    words += ["-b", "n", "-sync", "n", "-wd", "/", "-o", "/dev/null", "-j", "y", "-r", "n", "-notify"]
    if found.pe != NO_PE:
        words += ["-pe", found.pe, str(slots(submission))]
    else:
        if slots(submission) != submission.tasks:
            raise UsageError(
                "--worker-cores and --server-cores need a parallel environment, and this job is an array",
                "name one by --pe, or leave out the cores",
            )
        words += ["-t", f"1-{submission.tasks}"]
    if options.queue:
        words += ["-q", options.queue]
    if options.project:
        words += ["-P", options.project]
    asked = requests(submission, found)
    if asked:
        words += ["-l", ",".join(asked)]
    return (*words, *shlex.split(options.config.get("args", "")), *options.args)


def slots(submission: Submission) -> int:
    """Return how many slots the job needs: one for each core of its tasks."""
    return sum(group.count * max(1, group.needs.cores) for group in submission.groups)


def requests(submission: Submission, found: SgePreparation) -> list[str]:
    """Return what follows `-l`. Grid Engine takes one request for all slots, so it is the larger of the roles'.

    A resource that is consumed counts a slot, a host or a job, as its definition says (`qconf -sc`).

    Raises:
        UsageError: a resource is not defined, or counts a slot, and a task's cores do not share it evenly.
    """
    options, kinds = submission.options, found.complexes
    asked = [f"h_rt={math.ceil(options.time_s)}"] if options.time_s else []
    cores = [(max(1, group.needs.cores), group.count) for group in submission.groups]
    sizes = [-(-group.needs.memory // MIB) for group in submission.groups]
    if any(sizes):
        name = options.config.get("memory", MEMORY)
        asked.append(f"{name}={_amount(sizes, cores, _kind_of(name, kinds, 'memory', '--worker-memory'))}M")
    gpus = [group.needs.gpus for group in submission.groups]
    if any(gpus):
        name = options.config.get("gpu", GPU)
        kind = _kind_of(name, kinds, "gpu", "--worker-gpus")
        for count, (share, _) in zip(gpus, cores, strict=True):
            if kind == "YES" and count % share:
                raise UsageError(
                    f"Grid Engine counts {name} for each slot, and a task with {share} slots (cores) asks for {count}",
                    "ask for as many cores as GPUs, or by --engine-arg for what your site has",
                )
        asked.append(f"{name}={_amount(gpus, cores, kind)}")
    return asked


def _amount(each: Sequence[int], cores: Sequence[tuple[int, int]], kind: str) -> int:
    """Return how much of a resource is asked for, given what a task of each role needs, its cores and the tasks."""
    if kind == "JOB":
        return sum(number * tasks for number, (_, tasks) in zip(each, cores, strict=True))
    return max(-(-number // (slots if kind == "YES" else 1)) for number, (slots, _) in zip(each, cores, strict=True))


def in_an_empty_cluster(words: Sequence[str], complexes: str, hosts: str) -> tuple[str, ...]:
    """Return the command with requests that Grid Engine can verify for an empty cluster (`-w v`).

    It knows no load values that change then. What is free (mem_free) becomes what there is in all (mem_total); other
    such requests are left out.

    Args:
        complexes: what `qconf -sc` says: the resources, their shortcuts, and whether they are consumed.
        hosts: what `qhost -F` says: `hl:mem_free=1.0G`, where it is a load value.
    """
    loads = set(re.findall(r"\bhl:(\w+)=", hosts))
    rows = [line.split() for line in complexes.splitlines() if line[:1] != "#"]
    names = {name: row[0] for row in rows if len(row) >= 8 and row[5].upper() == "NO" for name in row[:2]}

    def verifiable(request: str) -> str:
        asked, equals, value = request.partition("=")
        name = names.get(asked, "")
        if name not in loads or _FIXED.fullmatch(name):
            return request
        total = name.replace("_free", "_total")
        return total + equals + value if total != name and total in loads else ""

    made: list[str] = []
    for option, word in zip(("", *words), words, strict=False):
        if option != "-l":
            made.append(word)
            continue
        kept = [each for each in map(verifiable, word.split(",")) if each]
        made[-1:] = ["-l", ",".join(kept)] if kept else []
    return tuple(made)


_FIXED = re.compile(r"arch|num_proc|m_\w+|\w+_total")
"""Load values that do not change: `-w v` knows them."""


def _kind_of(name: str, kinds: Mapping[str, str], key: str, option: str) -> str:
    if kinds and name not in kinds:
        raise UsageError(
            f"{option}: this Grid Engine has no resource {name!r}",
            f"`qconf -sc` lists them; name yours as {key} = 'NAME' in the [sge] section of the configuration file",
        )
    return kinds.get(name, "NO")


def choose(environments: Sequence[Mapping[str, str]], wanted: str) -> str:
    """Return the name of the parallel environment to use; NO_PE: an array.

    `environments`: what `qconf -sp` says of each. One that lets `qrsh -inherit` start agents (control_slaves TRUE) is
    taken if it is the only one over several hosts, or the only one.

    Raises:
        UsageError: the wanted one is not there or does not let it; or there are several to choose from.
    """
    by_name = {each.get("pe_name", ""): each for each in environments}
    if wanted == NO_PE:
        return NO_PE
    shown = ", ".join(
        "{} ({}, {} slots{})".format(
            name, each.get("allocation_rule", "?"), each.get("slots", "?"), "" if _is_tight(each) else ", no qrsh"
        )
        for name, each in by_name.items()
    )
    if wanted and wanted not in by_name:
        raise UsageError(
            f"--pe {wanted}: there is no such parallel environment",
            f"there are: {shown or 'none'}; or --pe none: an array",
        )
    if wanted:
        if not _is_tight(by_name[wanted]) and by_name[wanted].get("allocation_rule") != "$pe_slots":
            raise UsageError(
                f"--pe {wanted}: its control_slaves is FALSE, so agents cannot be started on its hosts",
                f"there are: {shown}; or --pe none: an array",
            )
        return wanted
    tight = [name for name, each in by_name.items() if _is_tight(each)]
    wide = [name for name in tight if by_name[name].get("allocation_rule") != "$pe_slots"]
    if len(wide) == 1 or len(tight) == 1:
        return (wide or tight)[0]
    if not tight:
        return NO_PE
    raise UsageError("--pe is needed: this Grid Engine has several parallel environments", f"choose one: {shown}")


def _is_tight(environment: Mapping[str, str]) -> bool:
    return environment.get("control_slaves", "").upper() == "TRUE"


# What Grid Engine says. No side effects.


class QstatRow(NamedTuple):
    """A line of `qstat`: a job that waits, or one slot or task that runs."""

    id: str
    name: str
    state: str
    """As in `qstat`: qw, hqw, Eqw, t, r, dr, s, S, T ..."""
    queue: str = ""
    """The queue that it runs in or asks for."""
    host: str = ""
    """Where it runs; empty: it waits."""
    slots: int = 1
    task: str = ""
    """Of an array: the task's number, or those that wait."""
    is_master: bool = True
    priority: float = 0.0


class AccountingRecord(NamedTuple):
    """What the accounting says of a job on one host, or of one task of an array."""

    host: str
    task: str
    failed: int
    failure: str
    code: int
    wall_s: float
    max_memory: str
    category: str
    """What was asked for."""


def _xml(text: str, is_lenient: bool = True) -> ElementTree.Element:
    """Return what `qstat -xml` prints; an empty element for what is no XML. Raises EngineError unless `is_lenient`."""
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as err:
        if is_lenient:
            return ElementTree.Element("none")
        raise EngineError(f"qstat -xml: expected XML, found {one_line(text)!r} ({err})") from err


def parse_jobs(text: str, is_lenient: bool = False) -> list[QstatRow]:
    """Return the rows of `qstat -xml`. Raises EngineError for what is no XML, unless `is_lenient`."""
    rows = []
    for each in _xml(text, is_lenient).iter("job_list"):
        queue, _, host = each.findtext("queue_name", "").partition("@")
        rows.append(
            QstatRow(
                each.findtext("JB_job_number", ""),
                each.findtext("full_job_name", "") or each.findtext("JB_name", ""),
                each.findtext("state", ""),
                queue or each.findtext("hard_req_queue", "") or "",
                host,
                int(each.findtext("slots") or 1),
                each.findtext("tasks", ""),
                each.findtext("master", "MASTER") == "MASTER",
                float((each.findtext("JAT_prio") or "0").replace(",", ".")),  # as the locale has it
            )
        )
    return rows


def grants(running: Iterable[QstatRow], job: SgeJob) -> tuple[Grant, ...]:
    """Return the places of a job that runs, given its rows of `qstat -g t`.

    Of a parallel job there is a row SLAVE for each slot and one more, MASTER, for the script; in an environment whose
    first task is the script, MASTER is a slot.
    """
    rows = list(running)
    if job.is_array:
        return tuple(
            Grant(row.task, row.host, {SERVER if int(row.task) <= job.servers else WORKER: 1})
            for row in sorted(rows, key=lambda row: int(row.task))
        )
    slaves = [row for row in rows if not row.is_master]
    masters = [row.host for row in rows if row.is_master]
    hosts = masters[:1] + [row.host for row in slaves]
    count = {host: sum(row.slots for row in slaves if row.host == host) for host in dict.fromkeys(hosts)}
    if masters and len(slaves) < job.slots:
        count[masters[0]] += 1
    return tuple(Grant(host, host, cores=max(1, number)) for host, number in count.items())


def position(pending: Sequence[QstatRow], job: str) -> str:
    """Return which place a job has among those that wait, in the scheduler's order."""
    ready = list(dict.fromkeys(row.id for row in pending if not row.host and not set(row.state) & set("hEd")))
    if job not in ready:
        return "waiting to be scheduled"
    queue = next((row.queue for row in pending if row.id == job), "")
    return f"position {ready.index(job) + 1} of {len(ready)}{f' in {queue}' if queue else ''}"


def _condition(running: Sequence[QstatRow]) -> str:
    states = "".join(row.state for row in running)
    if "d" in states:
        return "being deleted"
    return "suspended" if set(states) & set("sST") else ""


def parse_errors(text: str) -> str:
    """Return the reasons of an error state, from `qstat -xml -j`."""
    found = [each.text or "" for each in _xml(text).iter("QIM_message")]
    # `11/24/2026 10:44:58 [0:213]: error: can't chdir ...`
    return "; ".join(
        dict.fromkeys(re.sub(r"^[0-9/]+ [0-9:]+ \[[0-9:]+\]: (error: )?", "", each.strip()) for each in found)
    )


def parse_states(text: str) -> dict[str, str]:
    """Return the state of each queue instance of `qstat -xml -f`: letters, `E`, `au`; empty: it takes jobs."""
    return {each.findtext("name", ""): each.findtext("state", "") for each in _xml(text).iter("Queue-List")}


_NO_MESSAGES = ("(Collecting of scheduler job information", "There are no messages available")
"""Texts in place of messages: the site turns them off, or the scheduler has not looked again yet."""


def parse_messages(text: str, job: str) -> list[str]:
    """Return what the scheduler says of a job that waits, from `qstat -xml -j`."""
    found = []
    for each in _xml(text).findall("messages/element/*/element"):
        jobs = [number.text for number in each.iter("ULNG_value")]
        if not jobs or job in jobs:
            found.append(each.findtext("MES_message", ""))
    return [message for message in found if not message.startswith(_NO_MESSAGES)]


def parse_verdict(text: str) -> list[str]:
    """Return why a job cannot start now, from `qalter -w p`."""
    found = re.findall(r"^Job [0-9.]+ (.+)$", text, re.MULTILINE)
    return [message for message in found if not message.startswith(_NO_MESSAGES)]


def reasons(messages: Sequence[str], errors: str, states: Mapping[str, str]) -> str:
    """Return why a job waits, in a few words without numbers that change: `disabled: all.q@h1, all.q@h2`.

    Args:
        messages: what `parse_messages` or `parse_verdict` found.
        errors: why an earlier start of it failed.
        states: what `parse_states` found, where a queue is not available, or no message is there of a failed start.
    """
    found: dict[str, list[str]] = {}
    broken = [queue for queue, state in states.items() if "E" in state]
    if errors and not messages and broken:  # a start that fails can put its queue into an error state
        found[_STATES["E"]] = broken
    slots = ""
    for message in messages:
        about = _ABOUT.fullmatch(message)
        offers = _OFFERS.fullmatch(message)
        if about is not None:
            why = _why_not(about["why"], about["asked"] or "", states.get(about["where"], ""))
            where = about["where"].partition("@")[0] if why == "full" else about["where"]
            found.setdefault(why, []).append(where)
        elif offers is not None:
            slots = f"too few slots are free in {offers[1]}"
        elif not message.startswith("All queues dropped"):
            found.setdefault(message, [])
    if slots and not set(found) - {"full"}:
        found[slots] = []
    found.pop("", None)
    texts = [f"could not be started: {errors}"] if errors else []
    for why, where in itertools.islice(found.items(), SHOWN):
        names = sorted(set(where))
        shown = ", ".join(names[:SHOWN]) + (" and others" if len(names) > SHOWN else "")
        texts.append(f"{why}: {shown}" if shown else why)
    return "; ".join(texts)


_ABOUT = re.compile(
    r'(?:\(-l (?P<asked>[^)]*)\) )?(?:queue instance|cannot run (?:in queue|at host|on host)) "(?P<where>[^"]+)" '
    r"(?:dropped )?(?:because|until) (?P<why>.*)"
)
_OFFERS = re.compile(r'cannot run in PE "([^"]+)" because it only offers [0-9]+ slots')
_STATES = {
    "E": "in an error state (E)",
    "u": "not heard of (u)",
    "d": "disabled",
    "D": "disabled now by its calendar",
    "s": "suspended",
    "S": "suspended by another queue",
    "C": "suspended now by its calendar",
}
"""What the letters of a queue's state mean, the worst first."""


def _why_not(text: str, asked: str, state: str) -> str:
    """Return what a message of the scheduler says of one queue or host; empty: it is not for this job."""
    if "not contained in its hard queue list" in text:
        return ""
    lacks = re.match(r"it offers only \w+:(\w+)=", text)
    if text == "it is full" or (lacks and lacks[1] == "slots"):
        return "full"
    if lacks:
        return "no " + next((each for each in asked.split(",") if each.startswith(lacks[1] + "=")), lacks[1])
    if text.startswith("clean up"):
        return "not cleaned up after an earlier start"
    if "not available" in text:
        return next((_STATES[letter] for letter in _STATES if letter in state), "not available")
    return re.sub(r"^it is ", "", text.partition(":")[0])


def parse_settings(text: str) -> dict[str, str]:
    """Return names and values of what `qconf` shows; a value that goes on in the next line is joined."""
    lines = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return {words[0]: " ".join(words[1].split()) if len(words) > 1 else "" for words in lines}


def parse_complexes(text: str) -> dict[str, str]:
    """Return by name and by shortcut how each resource is consumed (NO, YES, JOB, HOST), from `qconf -sc`."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and not line.startswith("#"):
            found[words[0]] = found[words[1]] = words[5].upper()
    return found


def parse_id(text: str) -> str:
    """Return the job's number from what `qsub -terse` said, with whatever else a site prints; empty: there is none."""
    for pattern in (r"^\s*([0-9]+)(?:\.[0-9]+-[0-9]+:[0-9]+)?\s*$", r"[Yy]our job(?:-array)? ([0-9]+)"):
        found = re.findall(pattern, text, re.MULTILINE)
        if found:
            return str(found[-1])
    return ""


def parse_accounting(text: str) -> list[AccountingRecord]:
    """Return the records of `qacct -j`; none if it has none."""
    records = []
    for part in re.split(r"^=+\s*$", text, flags=re.MULTILINE)[1:]:
        values = parse_settings(part)
        number, _, failure = values.get("failed", "0").partition(":")
        records.append(
            AccountingRecord(
                values.get("hostname", ""),
                values.get("taskid", "").replace("undefined", ""),
                _number(number),
                failure.strip(),
                _number(values.get("exit_status", "0")),
                float(_number(values.get("ru_wallclock", "0"))),
                values.get("maxvmem", ""),
                values.get("category", ""),
            )
        )
    return records


def explanation(records: Sequence[AccountingRecord], is_array: bool, place: str) -> Explanation | None:
    """Return why Grid Engine ended a place (empty: the job); None: it did not."""
    mine = [each for each in records if not place or (each.task if is_array else each.host) == place] or records
    # A limit is recorded at one host; the agents of the others were told to stop. A script that could not be run is
    # why what was started beside it has died of a signal.
    ended_last = sorted(mine, key=lambda each: each.failed in (0, _AFTER))
    for each in [each for each in records if each.failed in _LIMITS] + ended_last:
        if each.failed in _LIMITS:
            return _limit(each)
        if each.failed in _MOVED:
            return Explanation(
                facts.EXIT_HOST_LOST, f"Grid Engine: {each.host} was lost or given away ({each.failure})"
            )
        if each.failed == _AFTER or (each.failed == 0 and each.code == NOTIFIED):
            runtime = _seconds(_asked(each).get("h_rt", ""))
            wall_s = each.wall_s if is_array else max(record.wall_s for record in records)  # others may begin later
            if runtime and wall_s >= runtime - LOOKED_S:
                return _time_limit(runtime)
            return Explanation(CANCELLED, "Grid Engine: the job was deleted or killed from outside (qdel)")
        if each.failed:
            return Explanation(
                facts.EXIT_START_FAILED, f"Grid Engine: {each.host} could not run the script: {each.failure}"
            )
    return None


_LIMITS = (37,)
"""`failed` of a job that exceeded h_rt, h_cpu or h_vmem."""
_MOVED = (21, 24, 25)
"""`failed` of a job that its host no longer knew, or that was migrated or scheduled again."""
_AFTER = 100
"""`failed` of a job that died of a signal."""


def _asked(record: AccountingRecord) -> dict[str, str]:
    return dict(re.findall(r"\b(h_rt|h_cpu|h_vmem)=(\S+?)(?:,|\s|$)", record.category))


def _limit(record: AccountingRecord) -> Explanation:
    asked = _asked(record)
    runtime = _seconds(asked.get("h_rt", ""))
    if runtime and ("h_vmem" not in asked or record.wall_s >= runtime):
        return _time_limit(runtime)
    if "h_vmem" in asked:
        return Explanation(
            facts.exit_code(None, "KILL"),
            f"Grid Engine: out of memory on {record.host} (maxvmem {record.max_memory} of h_vmem {asked['h_vmem']});"
            " raise --worker-memory",
        )
    return Explanation(facts.EXIT_TIMEOUT, f"Grid Engine: a limit of the queue was reached ({record.failure})")


def _time_limit(limit_s: float) -> Explanation:
    return Explanation(
        facts.EXIT_TIMEOUT, f"Grid Engine: the time limit of {duration(limit_s)} was reached; raise --time"
    )


def _seconds(text: str) -> float:
    """Return seconds of `3600` or `1:00:00`."""
    total = 0
    for part in text.split(":"):
        total = 60 * total + _number(part)
    return float(total)


def _number(text: str) -> int:
    found = re.match(r"\s*([0-9]+)", text)
    return int(found.group(1)) if found else 0


# Asking.


def _ask(*words: str, may_fail: bool = False) -> str:
    """Return what a command of Grid Engine prints. Raises EngineError if it fails, unless it may."""
    code, said = _run(words, is_strict=not may_fail)
    if code and not may_fail:
        raise _refused(" ".join(words), code, said)
    return said


def _run(words: Sequence[str], *, text: str = "", limit_s: float = ANSWER_S, is_strict: bool = True) -> tuple[int, str]:
    """Return exit code and output of a command. Raises EngineError if it is not there or does not answer in time."""
    try:
        told = execute(words, "source $SGE_ROOT/default/common/settings.sh first", text=text, limit_s=limit_s)
    except EngineError:
        if is_strict:
            raise
        return facts.EXIT_NOT_FOUND, ""
    return told.code, told.out if not told.code else f"{told.out}\n{told.err}"


def _listed(option: str) -> list[str]:
    """Return the names that `qconf` lists by an option. Raises EngineError if it fails."""
    code, said = _run(("qconf", option))
    if code and not re.match(r"no [\w ]+ defined", said.strip()):
        raise _refused(f"qconf {option}", code, said)
    return [] if code else said.split()


def _environments(wanted: str = "") -> list[dict[str, str]]:
    """Return what `qconf` says of the parallel environments; only of `wanted`, if there is one of that name."""
    names = _listed("-spl")
    return [parse_settings(_ask("qconf", "-sp", each)) for each in ([wanted] if wanted in names else names)]


def _check_listed(option: str, what: str, wanted: str, known: Sequence[str]) -> None:
    """Raise UsageError for a queue or project that is not listed; `q@host` and patterns are left to Grid Engine."""
    if not re.search(r"[@*?\[,]", wanted):
        check_known(option, f"Grid Engine has no {what}", wanted, known)


def _rows(job: str, is_strict: bool = False) -> list[QstatRow]:
    """Return the rows of a job of this user; none if Grid Engine does not answer, unless `is_strict`."""
    said = _ask("qstat", "-xml", "-g", "t", "-u", _user(), may_fail=not is_strict)
    return [row for row in parse_jobs(said, is_lenient=not is_strict) if row.id == job]


def _accounted(job: str) -> list[AccountingRecord]:
    return parse_accounting(_run(("qacct", "-j", job), limit_s=ACCOUNT_S, is_strict=False)[1])


def _was_deleted_in_queue(job: str) -> bool:
    """Whether a job that has ended never ran: in the list of jobs that have ended, it has the priority it waited with.

    Jobs that have run have none there; nor has one that the scheduler has not seen.
    """
    text = _ask("qstat", "-xml", "-s", "z", "-u", _user(), may_fail=True)
    return any(row.id == job and row.priority > 0 for row in parse_jobs(text, is_lenient=True))


def _refusal(words: Sequence[str]) -> str:
    """Return why Grid Engine says that a job could never run; empty: it could."""
    code, said = _run((*words, "-w", "v"), text="#!/bin/sh\n")  # any script would do
    lines = [re.sub(r"^Job [0-9.]+ ", "it ", line.removeprefix("Unable to run job: ")) for line in said.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("Exiting", "verification:"))]
    lines = [line for line in lines if "only offers 0 slots" not in line] or lines  # it follows from the others
    return "" if not code else "; ".join(lines[:SHOWN]) or f"exit code {code}"


def _unheard() -> set[str]:
    states = parse_states(_ask("qstat", "-xml", "-f", "-qs", "u", may_fail=True))
    return {name.partition("@")[2] for name, state in states.items() if "u" in state}


def _user() -> str:
    name = process.user_name()
    if not name:
        raise EngineError(f"user {os.geteuid()} has no name here, by which Grid Engine would know its jobs")
    return name


def _refused(what: str, code: int, said: str) -> EngineError:
    hint = "have this host made a submit host: qconf -as HOST" if "submit host" in said else ""
    return EngineError(f"{what}: {one_line(said) or f'exit code {code}'}", hint)
