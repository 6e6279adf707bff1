"""Slurm: an allocation by sbatch, or the one that this process is in, and one agent on each of its nodes by srun.

* Outside an allocation a script is submitted (`templates/slurm.sh`), which starts the agents and ends with them, so
  nothing stays in Slurm if the coordinator dies. Roles that need different things become a heterogeneous job.
* Inside one (`SLURM_JOB_ID`, as salloc and sbatch set it) srun is started at once, and only its step is cancelled.

What the agents need is the bootstrap and the enrolment secret. The secret is in the script, or, where nodes share a
folder with this machine, in a file; inside an allocation it is a variable of srun's environment. It is no argument.
What Slurm's commands print is read by `slurm_answers`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distrun.backends import slurm_answers as answers
from distrun.backends.engine import (
    ANSWER_S,
    ENDED,
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
    check_size,
    execute,
    fits,
    hint_of,
    refuse_queue_options,
    template,
    text_of,
    tries,
)
from distrun.backends.slurm_answers import Component
from distrun.errors import UsageError
from distrun.request import Needs
from distrun.templates import fill
from distrun_runtime.contract import environ, facts

SCRIPT = "slurm.sh"
LOG = "slurm.log"
"""What srun and the bootstraps print, in the folder of the submission."""
SECRET = "DISTRUN_ENROLMENT"
"""Has the enrolment secret; the bootstrap takes it out of the environment."""
SUBMIT_S = 60.0
STEP_S = 10.0
"""How long srun may take to make its step, or to say why it does not."""
EXPLAIN_S = 4.0
TERM_S = 10.0
"""How long agents have to end after SIGTERM, before their step is killed."""
POSITION_S = 15.0
"""How often the queue is asked for, which is long at some sites."""
LOG_BYTES = 4096
MISSING = (
    "log in to a host of the cluster; or name the folder of Slurm's commands in the configuration file:  "
    "bin = 'DIR' in [slurm]"
)
"""What to do where a command of Slurm is missing."""
NO_CONTROLLER = (
    "scontrol ping   says which hosts it asks; there:  systemctl start slurmctld; if they are not your cluster's:  "
    "export SLURM_CONF=/PATH/slurm.conf"
)
"""What to do where Slurm's controller does not answer, or its commands have no configuration."""

AGENT_OPTIONS = (
    "--export=ALL",
    "--overlap",
    "--ntasks-per-node=1",
    "--cpu-bind=none",
    "--mem=0",
    "--mpi=none",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--input=none",
    "--distribution=block",
)
"""srun's: each agent may use all that the job has on its node, and one that ends ends no other."""
JOB_OPTIONS = ("--export=NONE", "--no-requeue", "--chdir=/", "--output=/dev/null")
"""sbatch's: nothing of this environment is kept in Slurm; a job that has ended is not started again."""
ASK_OPTIONS = (
    "--job-name=ask",
    "--nodes=1",
    "--ntasks=1",
    "--mem=64M",
    "--time=2",
    "--immediate=10",
    "--export=HOME,PATH,USER",
    "--chdir=/",
    "--mpi=none",
    "--unbuffered",
    "--quiet",
)
"""srun's, for an agent that looks for what jobs have left on a node. One that has no room for it is not waited for."""
HIDDEN = (
    "SLURM_CPU_BIND*",
    "SLURM_GTIDS",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NPROCS*",
    "SLURM_NTASKS*",
    "SLURM_PROCID",
    "SLURM_SRUN_*",
    "SLURM_STEP*",
    "SLURM_TASK*",
)
"""What of the agent's own variables would mislead a task, which would take them for its rank and the job's size."""
MISLEADING = re.compile(
    r"SLURM_(MEM_\w+|NTASKS|NPROCS|NTASKS_PER_NODE|CPUS_PER_TASK|TRES_PER_TASK|HINT|THREADS_PER_CORE|DISTRIBUTION"
    r"|EXCLUSIVE|EXACT|CPU_BIND\w*|STEP\w*|PROCID|NODEID|LOCALID|GTIDS|TASK_PID|SRUN_COMM\w*|LAUNCH_NODE_IPADDR)"
)
"""Variables of an allocation that srun would take for options, as in the template, or that belong to another step."""
SHARED = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "fuse.ceph",
        "glusterfs",
        "fuse.glusterfs",
        "wekafs",
        "panfs",
        "afs",
        "orangefs",
        "pvfs2",
        "cifs",
        "smb3",
    ]
)
"""File systems that nodes of a cluster usually share."""

NODE_STATES = ("-h", "-N", "-o", "%N %T")
PARTITIONS = ("-h", "-e", "-o", "%R|%l|%c|%m|%G|%D|%a")


@dataclass(frozen=True)
class SlurmPreparation(Preparation):
    """What is known of Slurm, or of the allocation around this process, before a job is submitted."""

    is_shared: bool = False
    """Nodes see the folder of the submission."""
    most: tuple[int, ...] = ()
    """`Component.most` of each component."""
    inside: str = ""
    """The job in whose allocation this process is; empty: in none. What follows is of that."""
    nodes: str = ""
    sizes: tuple[str, ...] = ()
    """Nodes of each component."""
    gpus: str = ""
    """What a step asks for on each node; empty: nothing."""
    grants: tuple[Grant, ...] = ()


class SlurmJob(NamedTuple):
    """What the handle of a job has to say of it."""

    log: str = ""
    cluster: str = ""
    step: str = ""
    """The name of the step in an allocation of the user's; empty: the job was submitted."""
    components: Sequence[Component] = ()
    grants: Sequence[Grant] = ()
    """In an allocation of the user's."""

    @staticmethod
    def of(handle: Handle) -> SlurmJob:
        """Return what `_asdict` gave, also after it was JSON."""
        found = SlurmJob(**handle.more)
        parts = [Component(roles, Needs(*needs), most) for roles, needs, most in found.components]
        return found._replace(components=parts, grants=[Grant(*each) for each in found.grants])


class Slurm(Engine):
    """The Slurm cluster whose commands are on the PATH, or in the folder `bin` of the configuration."""

    name = "slurm"
    shows = "SLURM_*"
    hides = HIDDEN

    def __init__(self) -> None:
        self._srun: subprocess.Popen[bytes] | None = None
        """Inside an allocation, in the process that started it."""
        self._position = ("", 0.0)
        self._down: dict[str, str] = {}
        """Nodes of the job that were seen down, and their states."""

    # ------------------------------------------------------------------ before submitting

    def prepare(self, submission: Submission) -> SlurmPreparation:
        """Look for an allocation around this process, else for a partition with room for the job."""
        self.options = submission.options
        inside = submission.outer.get("SLURM_JOB_ID", "")
        if inside:
            return self._prepare_inside(submission, inside)
        try:
            partitions = answers.partitions(self._ask("sinfo", *PARTITIONS))
        except EngineError:
            if not submission.is_dry:
                raise
            partitions = []
        options = submission.options
        answers.refuse_partition(partitions, options.queue, options.time_s)
        nodes = [each.room for each in answers.of_queue(partitions, options.queue)]
        where = f"node of {options.queue}" if options.queue else "node"
        hint = "ask for less, or for another partition with --queue; sinfo -N -l shows the nodes"
        check_size(submission.groups, nodes, where, hint)
        most = tuple(_most(asked, nodes) for asked in components(submission))
        return SlurmPreparation(is_shared=self._is_shared(submission.folder), most=most)

    def _prepare_inside(self, submission: Submission, job: str) -> SlurmPreparation:
        why = f"this is inside Slurm's job {job}, whose nodes are used"
        instead = "submit a job of its own:  env -u SLURM_JOB_ID distrun launch ..."
        refuse_queue_options(submission.options, why, instead, {"--time": submission.options.time_s})
        try:
            found = answers.jobs(self._ask("scontrol", "show", "job", "-d", "-o", job, unknown=answers.UNKNOWN_JOB))
        except EngineError:
            if not submission.is_dry:
                raise
            return SlurmPreparation(inside=job, nodes="{nodes}", sizes=("{number of nodes}",))
        if not found or any(each.state != "RUNNING" for each in found):
            state = found[0].state if found else "not known to Slurm"
            raise UsageError(
                f"$SLURM_JOB_ID is {job}, and that job is {state}",
                "leave that allocation (exit), or unset SLURM_JOB_ID to submit a job",
            )
        from distrun.backends.queue import check_room  # it is what uses engines

        grants = answers.grants(found, components(submission), is_ours=False)
        used = check_room(submission, grants, True)
        if len(found) > 1:
            used = {each.place for each in grants}
        grants = tuple(each for each in grants if each.place in used)
        nodes = [each.node for each in grants]
        return SlurmPreparation(
            "" if submission.oversubscribe else answers.crowded(found, submission.groups),
            inside=job,
            nodes=",".join(nodes),
            sizes=tuple(str(len(each.cpus)) for each in found) if len(found) > 1 else (str(len(nodes)),),
            gpus=_gpus_inside(submission.outer),
            grants=grants,
        )

    def _is_shared(self, folder: Path) -> bool:
        """Return whether nodes see the submission's folder: as the configuration says, else by its file system."""
        said = self.options.config.get("shared_folders", "").lower()
        if said:
            if said not in ("yes", "no"):
                raise UsageError(f"shared_folders = {said}: expected true or false", "correct the configuration file")
            return said == "yes"
        return _file_system(folder) in SHARED

    def render(self, submission: Submission) -> Script:
        """Return the script and sbatch's command line; inside an allocation, srun's. Pure but for the template."""
        found: SlurmPreparation = submission.found
        if found.inside:
            return Script({}, (self._inside_command(submission),))
        parts = components(submission, found.most)
        word = str(submission.secret_file) if found.is_shared else f"env:{SECRET}"
        place = f"env:{answers.place_variable(len(parts))}"
        agent = submission.bootstrap.command(submission.python, place, word)
        secret = "" if found.is_shared else f"export {SECRET}={shlex.quote(submission.secret)}"
        values = {
            "log": shlex.quote(str(submission.folder / LOG)),
            "secret": secret or "# The secret is in a file that the agents read.",
            "agent": shlex.join(agent),
            "srun": self._agents(submission, parts),
        }
        text = fill(template(SCRIPT, submission.options), values)
        submit = shlex.split(submission.options.config.get("submit", "")) or [self._program("sbatch")]
        argv = [*submit, "--parsable"]
        for number, asked in enumerate(parts):
            argv += [":"] if number else []
            argv += [*JOB_OPTIONS, f"--job-name={submission.marker}", *self._wanted(submission, asked)]
        return Script({SCRIPT: text}, ((*argv, str(submission.folder / SCRIPT)),))

    def _program(self, name: str) -> str:
        folder = self.options.config.get("bin", "")
        return str(Path(folder).expanduser() / name) if folder else name

    @staticmethod
    def _wanted(submission: Submission, asked: Component) -> list[str]:
        """Return sbatch's options for one component."""
        options, needs = submission.options, asked.needs
        words = [f"--ntasks={asked.tasks}"]
        if needs.cores:
            words.append(f"--cpus-per-task={needs.cores}")
        if needs.memory:
            words.append(f"--mem-per-cpu={math.ceil(needs.memory / max(1, needs.cores) / (1 << 20))}M")
        if needs.gpus:
            # Not --gpus-per-task: a step has one agent a node, and would get the GPUs of one task.
            nodes = asked.tasks // asked.most
            words += [f"--nodes={nodes}", f"--ntasks-per-node={asked.most}", f"--gres=gpu:{asked.gpus}"]
        if options.queue:
            words.append(f"--partition={options.queue}")
        if options.project:
            words.append(f"--account={options.project}")
        if options.time_s is not None:
            words.append(f"--time={math.ceil(options.time_s / 60)}")  # minutes
        return [*words, *shlex.split(options.config.get("args", "")), *options.args]

    def _agents(self, submission: Submission, parts: Sequence[Component]) -> str:
        """Return the shell command that starts the agents of a job that was submitted."""
        extra = shlex.split(submission.options.config.get("srun_args", ""))
        has_gpus = any(each.needs.gpus for each in parts)
        text = self._program("srun")
        for number, asked in enumerate(parts):
            group = f"_HET_GROUP_{number}" if len(parts) > 1 else ""
            nodes = f'"$SLURM_JOB_NUM_NODES{group}"'
            words = [*AGENT_OPTIONS, *([f"--het-group={number}"] if group else [])]
            words += [f"--gres=gpu:{asked.gpus}" if asked.gpus else "--gres=none"] if has_gpus else []
            text += " : \\\n   " if number else ""
            text += f' {shlex.join([*words, *extra])} --nodes={nodes} --ntasks={nodes} "${{agent[@]}}"'
        return text

    def _inside_command(self, submission: Submission) -> tuple[str, ...]:
        """Return what is executed inside an allocation."""
        found: SlurmPreparation = submission.found
        place = f"env:{answers.place_variable(len(found.sizes))}"
        agent = submission.bootstrap.command(submission.python, place, f"env:{SECRET}")
        extra = [*shlex.split(submission.options.config.get("srun_args", "")), *submission.options.args]
        words = [self._program("srun")]
        for number, size in enumerate(found.sizes):
            words += [":"] if number else []
            words += [*AGENT_OPTIONS, f"--jobid={found.inside}", f"--job-name={submission.marker}"]
            words += [f"--het-group={number}"] if len(found.sizes) > 1 else [f"--nodelist={found.nodes}"]
            words += [f"--gres=gpu:{found.gpus}"] if found.gpus else []
            words += [f"--nodes={size}", f"--ntasks={size}", *extra, *agent]
        return tuple(words)

    # ------------------------------------------------------------------ the job in Slurm

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Run sbatch, or start srun."""
        [argv] = script.commands
        log = str(submission.folder / LOG)
        if submission.found.inside:
            return self._start_step(submission, argv, log)
        job = SlurmJob(log, components=components(submission, submission.found.most))
        try:
            told = self._run(argv, limit_s=SUBMIT_S)
        except EngineError as err:
            # It may have been taken all the same, if the answer was late.
            late: list[Handle] = []
            with contextlib.suppress(EngineError):
                late = [each.handle for each in self.find() if each.marker == submission.marker]
            if not late:
                raise EngineError(str(err), hint_of(str(err), HINTS)) from err
            return late[0]._replace(more=job._asdict())
        match = re.search(r"^(\d+)(?:;(\S+))?\s*$", told, re.M) or re.search(r"Submitted batch job (\d+)()", told)
        if match is None:
            raise EngineError(f"sbatch printed no job number, but: {told.strip()[:200] or 'nothing'}", "")
        return Handle(self.name, match[1], job._replace(cluster=match[2] or "")._asdict())

    def _start_step(self, submission: Submission, argv: Sequence[str], log: str) -> Handle:
        env = {name: value for name, value in submission.outer.items() if not MISLEADING.fullmatch(name)}
        try:
            with open(log, "xb") as file:
                self._srun = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**env, SECRET: submission.secret},
                    start_new_session=True,  # Ctrl-C is the coordinator's to judge
                )
        except OSError as err:
            raise EngineError(
                f"{argv[0]} cannot be started: {err}", "see that Slurm's commands are on the PATH"
            ) from err
        job = SlurmJob(log, step=submission.marker, grants=submission.found.grants)
        handle = Handle(self.name, submission.found.inside, job._asdict())
        for _ in tries(STEP_S):
            if self._step(handle):
                break
            if self._srun.poll() is not None:
                raise EngineError(
                    f"srun has ended: {_tail(log) or self._srun.returncode}",
                    "this must work here: srun --overlap hostname",
                )
        return handle

    def look(self, handle: Handle) -> QueueStatus:
        """Ask scontrol for the job, and squeue for its position or sinfo for its nodes."""
        found, job = self._jobs(handle), SlurmJob.of(handle)
        if job.step:
            return self._look_inside(handle, job, found)
        grants = answers.grants(found, job.components, is_ours=True) if job.components else ()
        standing = answers.standing(found, grants, self._position_of(handle, found))
        if standing.state == ENDED:
            standing = standing._replace(why=answers.explanation(found, ""))
        if standing.state == ENDED and found and any(each.state == "FAILED" for each in found):
            standing = standing._replace(text="; ".join(filter(None, (standing.text, _tail(job.log)))))
        return self._without_lost_nodes(standing, answers.is_ending(found))

    def _look_inside(self, handle: Handle, job: SlurmJob, found: Sequence[answers.ScontrolJob]) -> QueueStatus:
        if found and all(each.state == "RUNNING" for each in found) and not self._step_lives(handle):
            return QueueStatus(ENDED, "; ".join(filter(None, ("srun has ended", _tail(job.log)))))
        standing = answers.standing(found, job.grants)
        told = answers.told_by_srun(text_of(job.log, LOG_BYTES))
        gone = {**{place: what for place, what in told.items() if not what.startswith("Exited")}, **standing.gone}
        return self._without_lost_nodes(standing._replace(gone=gone), answers.is_ending(found))

    def _without_lost_nodes(self, standing: QueueStatus, is_ending: bool) -> QueueStatus:
        """Add the places whose nodes are down; a job that ends does not wait for them."""
        if standing.state != RUNNING or not standing.grants:
            return standing
        nodes = ",".join(dict.fromkeys(each.node for each in standing.grants))
        states = answers.node_states(self._ask("sinfo", *NODE_STATES, "-n", nodes))
        if is_ending:
            return answers.ended_but_for_lost(standing, states)
        down = answers.down_nodes(states)
        self._down.update(down)
        gone = {each.place: f"{each.node} is {down[each.node]}" for each in standing.grants if each.node in down}
        return standing._replace(gone={**gone, **standing.gone})

    def cancel(self, handle: Handle) -> None:
        """Run scancel for the job, or for the step in an allocation of the user's."""
        if not SlurmJob.of(handle).step:
            self._ask("scancel", *_cluster(handle), handle.id, unknown=answers.GONE_ALREADY)
            return
        # Agents that get SIGTERM end their tasks; else Slurm kills all.
        for words, limit_s in ((("--signal=TERM",), TERM_S), ((), 0.0)):
            for number, _ in enumerate(tries(limit_s)):
                step = self._step(handle)
                if not step:
                    return
                if not number:
                    self._ask("scancel", *words, step, unknown=answers.GONE_ALREADY)

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return what scontrol, sacct and srun say; waits a little for a job that is just ending."""
        told = answers.told_by_srun(text_of(SlurmJob.of(handle).log, LOG_BYTES)).get(place, "")
        by_srun = answers.explained_by_srun(told)
        found: Sequence[answers.ScontrolJob] = ()
        # The agents have gone: a job of ours is about to end, and only then is it known what became of its step.
        for _ in tries(EXPLAIN_S):
            found = self._jobs(handle)
            if not found or self._is_over(handle, found):
                break
        accounts = self._accounts(handle) if any(each.state in answers.OVER for each in found) or not found else ""
        explained = answers.explanation(found, accounts)
        if explained is not None and explained.code == facts.EXIT_HOST_LOST and answers.has_lost_node(found):
            return self._with_node(explained, found)
        if explained is not None or by_srun is not None:
            return explained or by_srun
        nodes = {each.place: each.node for each in self.look(handle).grants}
        state = self._down.get(nodes.get(place, ""))
        return Explanation(facts.EXIT_HOST_LOST, f"Slurm: {nodes[place]} is {state}") if state else None

    def _with_node(self, explained: Explanation, found: Sequence[answers.ScontrolJob]) -> Explanation:
        """Return why a job ended, with the node that failed: Slurm ends the tasks on all others in the same moment."""
        nodes = ",".join(node for job in found for node in job.cpus)
        with contextlib.suppress(EngineError):
            self._down.update(answers.down_nodes(answers.node_states(self._ask("sinfo", *NODE_STATES, "-n", nodes))))
        if not self._down:
            return explained
        text = ", ".join(f"{node} is {state}" for node, state in self._down.items())
        return explained._replace(text=f"{explained.text}: {text}", lost=next(iter(self._down)))

    @staticmethod
    def _is_over(handle: Handle, found: Sequence[answers.ScontrolJob]) -> bool:
        """Return whether Slurm can say how a job ended; an allocation of the user's goes on without us."""
        if SlurmJob.of(handle).step and not answers.is_ending(found):
            return True
        return all(each.state in answers.OVER for each in found)

    def _accounts(self, handle: Handle) -> str:
        """Return what accounting has of the job; empty where there is none."""
        columns = "JobID,State,ExitCode,MaxRSS,ReqMem"
        try:
            return self._ask("sacct", *_cluster(handle), "-n", "-P", "-j", handle.id, "-o", columns, limit_s=2.0)
        except EngineError:
            return ""

    def on_node(self, node: str, argv: Sequence[str]) -> tuple[str, ...]:
        """Return srun's command line for a job of its own on that node, also inside an allocation."""
        own = ("env", *(word for name in ("SLURM_JOB_ID", "SLURM_JOBID") for word in ("-u", name)))
        return (*own, self._program("srun"), *ASK_OPTIONS, f"--nodelist={node}", *argv)

    def find(self) -> Sequence[FoundJob]:
        """Return this user's jobs and steps that are called as distrun calls them."""
        user = ("-h", "--me")
        queue = self._ask("squeue", *user, "-o", "%i|%j|%T")
        steps = self._ask("squeue", *user, "--steps", "-o", "%i|%j")
        found = []
        for number, (marker, state) in answers.marked(queue, steps).items():
            job, dot, _ = number.partition(".")
            handle = Handle(self.name, re.sub(r"\+.*", "", job), SlurmJob(step=marker if dot else "")._asdict())
            found.append(FoundJob(handle, marker, state))
        return found

    def examine(self) -> Iterator[CheckResult]:
        """Look for Slurm's commands, its controller, a partition, and accounting."""
        try:
            version = self._ask("sbatch", "--version").strip()
            self._ask("srun", "--version")
        except EngineError as err:
            yield CheckResult(False, f"Slurm's commands: {err}", err.hint or NO_CONTROLLER)
            return
        yield CheckResult(True, f"Slurm's commands: {version}")
        try:
            told = " ".join(self._ask("scontrol", "ping").split())
            yield CheckResult(" UP" in told, f"controller: {told}", NO_CONTROLLER)
            partitions = answers.partitions(self._ask("sinfo", *PARTITIONS))
        except EngineError as err:
            yield CheckResult(False, f"controller: {err}", NO_CONTROLLER)
            return
        up = sorted({each.name for each in partitions if each.is_up and each.nodes})
        yield CheckResult(bool(up), f"partitions (--queue): {', '.join(up) or 'none is up'}", "sinfo -R   says why")
        try:
            self._ask("sacct", "-n", "-X", "-S", "now", limit_s=5.0)
            yield CheckResult(True, "accounting: sacct answers")
        except EngineError:
            yield CheckResult(True, "accounting: none; why a job ended is known for as long as scontrol shows it")
        job = environ.snapshot().get("SLURM_JOB_ID", "")
        where = f"inside job {job}: launches use its nodes" if job else "outside an allocation: launches submit jobs"
        yield CheckResult(True, where)

    # ------------------------------------------------------------------ asking

    def _jobs(self, handle: Handle) -> list[answers.ScontrolJob]:
        words = (*_cluster(handle), "show", "job", "-d", "-o", handle.id)
        return answers.jobs(self._ask("scontrol", *words, unknown=answers.UNKNOWN_JOB))

    def _position_of(self, handle: Handle, found: Sequence[answers.ScontrolJob]) -> str:
        if not found or found[0].state != "PENDING" or found[0].reason in answers.HOPELESS:
            return ""
        text, asked = self._position
        if not asked or time.monotonic() > asked + POSITION_S:
            words = ("-h", "-t", "PENDING", "-p", found[0].partition, "--sort=-p,i", "-o", "%i")
            text = answers.position(self._ask("squeue", *_cluster(handle), *words), handle.id)
            self._position = (text, time.monotonic())
        return text

    def _step(self, handle: Handle) -> str:
        """Return the number of the step that was started in an allocation, JOB.STEP; empty: there is none."""
        told = self._ask("squeue", "-h", "--steps", "-j", handle.id, "-o", "%i|%j", unknown=answers.UNKNOWN_JOB)
        rows = (line.partition("|") for line in told.splitlines())
        return next((number for number, _, name in rows if name == SlurmJob.of(handle).step), "")

    def _step_lives(self, handle: Handle) -> bool:
        if self._srun is not None:
            return self._srun.poll() is None
        return bool(self._step(handle))

    def _ask(self, program: str, *words: str, unknown: Sequence[str] = (), limit_s: float = ANSWER_S) -> str:
        """Return what a command of Slurm prints. See `_run`."""
        return self._run([self._program(program), *words], unknown, limit_s)

    @staticmethod
    def _run(argv: Sequence[str], unknown: Sequence[str] = (), limit_s: float = ANSWER_S) -> str:
        """Return what a command prints; nothing if it fails with one of the words `unknown`. Raises EngineError."""
        env = {name: value for name, value in environ.snapshot().items() if name != "SLURM_TIME_FORMAT"}
        told = execute(argv, MISSING, env={**env, "LC_ALL": "C"}, limit_s=limit_s)
        if told.code and not any(each in told.said for each in unknown):
            raise EngineError(f"{argv[0]} says: {told.said}")
        return "" if told.code else told.out


# ---------------------------------------------------------------------- pure


def components(submission: Submission, most: Sequence[int] = ()) -> tuple[Component, ...]:
    """Return what is asked for: all tasks together if their roles need the same, else a component for each role.

    `most`: `Component.most` of each, once it is known; else all tasks that need GPUs go on one node.
    """
    groups = submission.groups
    if len({group.needs for group in groups}) == 1:
        parts = [Component(tuple((group.role, group.count) for group in groups), groups[0].needs)]
    else:
        parts = [Component(((group.role, group.count),), group.needs) for group in groups]
    most = most or [asked.tasks for asked in parts]
    return tuple(
        asked._replace(most=number if asked.needs.gpus else 0) for asked, number in zip(parts, most, strict=True)
    )


def _most(asked: Component, nodes: Sequence[Needs]) -> int:
    """Return how many tasks go on a node: the most that fit and that make all nodes alike."""
    cores, memory, gpus = asked.needs
    for number in range(asked.tasks, 1, -1):
        wanted = Needs(number * max(1, cores), number * memory, number * gpus)
        if asked.tasks % number == 0 and (not nodes or fits(wanted, nodes)):
            return number
    return 1


def _gpus_inside(outer: Mapping[str, str]) -> str:
    """Return how many GPUs a step is given on each node; empty: those of the allocation, without asking.

    In an allocation with --gpus-per-task a step would get the GPUs of one task a node.
    """
    each = outer.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    tasks = re.fullmatch(r"(\d+)(?:\(x\d+\))?", outer.get("SLURM_TASKS_PER_NODE", ""))
    return str(int(each) * int(tasks[1])) if each.isdigit() and tasks else ""


def _cluster(handle: Handle) -> tuple[str, ...]:
    cluster = SlurmJob.of(handle).cluster
    return ("-M", cluster) if cluster else ()


HINTS = {
    "invalid partition": "sinfo -s shows the partitions (--queue)",
    "invalid account": "sacctmgr show user $USER withassoc shows your accounts (--project)",
    "node configuration is not available": "ask for less, or for another partition; sinfo -N -l shows the nodes",
    "memory specification": "ask for less memory; sinfo -N -l shows the nodes",
    "time limit": "ask for less --time; sinfo -o '%P %l' shows the limits",
}
"""What to type after sbatch has refused a job, by words in what it says."""


# ---------------------------------------------------------------------- files


def _tail(log: str) -> str:
    """Return the last lines of what srun and the bootstraps wrote, as one; empty: nothing, or not to this machine."""
    lines = text_of(log, LOG_BYTES).splitlines()
    lines = [line for line in lines if line.strip() and "lacks support for cpu binding" not in line]
    return " | ".join(lines[-3:])


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on; empty where it cannot be told."""
    try:
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        # Not by `text_of`: files of /proc have no end to seek to.
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return right.split()[0]
    return ""
