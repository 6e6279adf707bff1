"""Options and helpers that several commands share."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from distrun.cli.console import print_err
from distrun.errors import UsageError
from distrun.options import (
    BY_KEY,
    FLAG,
    LAUNCHER,
    MERGED,
    SITE,
    SWITCH,
    TIMES,
    WORDS,
    Layer,
    Option,
    Sourced,
    decide,
    of_environment,
    user_path,
)
from distrun_runtime.contract import environ, facts
from distrun_runtime.errors import NoSuchJob

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.backends.queue import QueueBackend
    from distrun.cli.console import Console
    from distrun.fleet import Fleet
    from distrun.fleet.questions import HostAnswer, HostJob
    from distrun.hosts import Inventory
    from distrun.jobs import Job, Jobs
    from distrun_runtime.contract.plan import Host
    from distrun_runtime.coordinator.failures import Outcome, Problem
    from distrun_runtime.coordinator.jobfolder import JobFolder


TYPED = "words"
"""Key of click's `ctx.obj`: the words that were typed behind the command's name, before they are parsed (list of str).
`LazyGroup` puts them there, for hints and for `launch`, which may start itself again with them."""
SURVEY_S = 30.0
"""How long a host may take to say which jobs it has."""

Function = TypeVar("Function", bound=Callable[..., Any])


class _LauncherOption(click.Option):
    """--launcher, whose help lists the backends there are, registered ones included, when it is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's two cells in the help."""
        from distrun import backends

        self.help = str(self.help).format(launchers=", ".join(backends.names()))
        return super().get_help_record(ctx)


GIVEN = "distrun.given"
"""Key of click's `ctx.meta`: the values that were given by any source, and their origins (`decide`)."""


class JobCommand(click.Command):
    """A command that describes a job: what is not typed comes from other sources, as its `layers` say."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, with what other sources give in the place of defaults."""
        typed: dict[str, Sourced] = {}
        parsed = self.make_parser(ctx).parse_args(list(args))[0]
        for key, value in parsed.items():
            # Versions of click differ in the value of what is not given, and in the name of the help option.
            if isinstance(value, (str, int, list, tuple)) and value != ():
                typed[key] = Sourced(tuple(value) if isinstance(value, list) else value, "typed")
        given: Layer = {}
        if {"help", "_click_default_help"}.isdisjoint(typed):
            ctx.meta[GIVEN] = given = decide([typed, *self.layers(ctx, typed)])
            ctx.default_map = {
                key: value
                for key, (value, origin, _) in given.items()
                if key in BY_KEY and origin not in environ.BY_NAME  # else it takes effect by itself
            }
        if "file" in given and any(param.name == "command" for param in self.params):
            from distrun import jobfile

            if lacking := jobfile.unused(given):
                raise lacking
        rest = super().parse_args(ctx, args)
        for key in MERGED:
            if key in given and key in ctx.params:
                ctx.params[key] = given[key].value
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error in an option that a file gives is told with its place there."""
        try:
            return super().invoke(ctx)
        except UsageError as err:
            if not any(each.places for each in ctx.meta[GIVEN].values()):
                raise
            from distrun import jobfile

            raise jobfile.placed(err, ctx.meta[GIVEN]) from err

    def get_help(self, ctx: click.Context) -> str:
        """Return the help that was asked for: of a launch the options that are used most, or a group."""
        if "workers" not in [param.name for param in self.params]:
            return super().get_help(ctx)
        from distrun.cli.help import of_launch

        return of_launch(self, ctx, (ctx.obj or {}).get(TYPED, ()))

    def layers(self, ctx: click.Context, typed: Layer) -> Sequence[Layer]:
        """Return what the environment and files give: the job file, the profile, pyproject.toml, the user's file.

        Raises:
            UsageError: one of them is wrong, or no file has the profile.
        """
        file = typed["file"].value if "file" in typed else ""
        profile = typed["profile"].value if "profile" in typed else ""
        env = environ.snapshot()
        if ctx.info_name == "demo":  # it is the same everywhere
            return [of_environment(env)]
        config = user_path(env)
        project, content = _project()
        if not (file or profile or project or os.path.isfile(config)):
            return [of_environment(env)]
        from pathlib import Path

        from distrun import jobfile
        from distrun.requesting import engines

        found = []
        if project:
            found.append(jobfile.load(Path(project), jobfile.TOOL, content=content))
        if os.path.isfile(config):
            found.append(jobfile.load(Path(config), engines=engines))
        return [of_environment(env), *jobfile.layers(file, profile, found)]


def _project() -> tuple[str, bytes]:
    """Return the path and the content of the nearest pyproject.toml with a table for distrun; empty: there is none.

    A file of another user, or a link of theirs, is ignored: any user who can write to a folder above this one could run
    commands here by it.
    """
    from distrun.requesting import current_folder

    folder = current_folder()
    while True:
        path = os.path.join(folder, "pyproject.toml")
        with contextlib.suppress(OSError):
            if os.path.isfile(path):  # else it may be another user's pipe, on which this would wait
                with open(path, "rb") as file:
                    content, owner = file.read(), os.stat(file.fileno()).st_uid
                if b"tool.distrun" in content:
                    if {owner, os.lstat(path).st_uid} <= {0, os.getuid()}:
                        return path, content
                    say(f"{path} is ignored: it belongs to another user", "warning")
        if folder == (folder := os.path.dirname(folder)):
            return "", b""


def takes(*rows: Option) -> Callable[[Function], Function]:
    """Return what adds options to a command, in this order."""

    def add(function: Function) -> Function:
        for row in reversed(rows):
            function = _click_option(row)(function)
        return function

    return add


def _click_option(row: Option) -> Callable[[Function], Function]:
    def convert(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return row.read(value) if isinstance(value, (str, tuple)) else value

    without_value: dict[str, dict[str, Any]] = {
        FLAG: {"is_flag": True},
        SWITCH: {"default": None},
        TIMES: {"count": True},
    }
    how = without_value.get(row.kind) or {
        "callback": convert,
        "type": click.Choice(row.choices) if row.choices and not row.value else click.UNPROCESSED,
        "metavar": row.value or None,
        "multiple": row.kind == WORDS,
        "show_default": bool(row.default) and "[default:" not in row.help,
    }
    if row.default is not None:
        how["default"] = row.default  # one of None would count as given
    names = [row.name] if row.kind == SWITCH else row.name.split("/")
    kind = _LauncherOption if row == LAUNCHER else click.Option
    return click.option(*names, row.key, cls=kind, help=row.help, required=row.required, hidden=row.hidden, **how)


def my_jobs() -> Jobs:
    """Return the user's jobs; what should be known of one besides is printed to stderr."""
    from distrun.jobs import Jobs

    return Jobs(say=say)


def job_and_tasks(
    jobs: Jobs, job: str | None, tasks: tuple[str, ...], prefers_living: bool = False
) -> tuple[Job, tuple[str, ...]]:
    """Return the job that is meant (`Jobs.get`), and tasks: a word that could be one, and is no job, is the latest's.

    Raises:
        NoSuchJob: there is none, or several ids begin so.
    """
    try:
        return jobs.get(job, prefers_living), tasks
    except NoSuchJob:
        if job is None or not re.fullmatch(f"({'|'.join(facts.ROLES)})(-[0-9]+)?", job):
            raise
    return jobs.get(None, prefers_living), (job, *tasks)


def say(text: str, level: str) -> None:
    """Print a message of distrun's own to stderr."""
    print_err(f"distrun: {'' if level == 'info' else level + ': '}{text}\n")


def agree(question: str, yes: bool, hint: str = "look first: --dry-run") -> None:
    """Ask on the terminal, unless `yes`. `hint`: for the error if stdin is no terminal.

    Raises:
        UsageError: stdin is no terminal.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} stdin is not a terminal to answer on; -y answers yes", hint)
    click.confirm(question, abort=True, err=True)


def placed(folder: JobFolder) -> tuple[int, int]:
    """Return how many agents and tasks the plan in a job's folder has; 0 and 0 if there is none yet."""
    from distrun_runtime.errors import RuntimeFault

    try:
        if folder.is_unplanned:
            return 0, 0
        plan = folder.plan()
    except (OSError, RuntimeFault):
        return 0, 0
    return len(plan.all_places), len(plan.tasks)


def tell_warnings(inventory: Inventory) -> None:
    """Print what is odd about the hosts that were named."""
    for warning in inventory.warnings:
        print_err(f"distrun: warning: {warning}\n")


def hosts_of(
    options: Mapping[str, Any], env: Mapping[str, str], launcher: str = ""
) -> tuple[Inventory, Backend, list[Host]]:
    """Return the hosts that a command means, the backend that reaches them, and what it needs to do so; tell warnings.

    Without a `launcher` it is ssh where hosts are named, else local: this machine.

    Raises:
        HostsError: what names the hosts cannot be read or understood.
        UsageError: there is no such launcher.
    """
    from distrun import backends
    from distrun.requesting import find_hosts, reach_options

    found = find_hosts(options, env)
    backend = backends.load(launcher or ("local" if found is None else "ssh"))
    inventory = backend.inventory(found)
    tell_warnings(inventory)
    return inventory, backend, hosts_for(inventory, backend, reach_options(options))


def hosts_for(inventory: Inventory, backend: Backend, options: Mapping[str, str]) -> list[Host]:
    """Return each host once, with the way that the backend takes to it."""
    from distrun_runtime.contract.plan import Host

    hosts = []
    for spec in inventory.specs:
        way = backend.reach(spec, options)
        hosts.append(Host(spec.name, spec.addr, reach=way, interface=spec.iface, login=backend.login(way)))
    return hosts


def survey(
    fleet: Fleet, wanted: Sequence[str] = (), stale: bool = False
) -> tuple[dict[str, HostAnswer | Problem], list[HostJob]]:
    """Ask hosts for jobs of mine; return what each answers, and the jobs (see `questions.chosen`)."""
    from distrun.fleet import questions

    found = fleet.ask("survey", {}, SURVEY_S)
    answers = {host: each for host, each in found.items() if isinstance(each, questions.HostAnswer)}
    every = [job for host, each in answers.items() for job in questions.read(host, each.value)]
    return found, questions.chosen(every, wanted, stale)


def hosts_as_json(
    answers: Mapping[str, HostAnswer | Problem], jobs: Sequence[HostJob], more: Callable[[HostJob], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each host in its JSON form: why it did not answer, and its jobs. `more`: what is said of a job besides."""
    from dataclasses import asdict

    from distrun.fleet.questions import HostAnswer

    rows = []
    for host, each in answers.items():
        mine = [
            {
                **{name: getattr(job, name) for name in ("job", "nonce", "agent", "guard")},
                "stale": job.is_stale,
                **more(job),
            }
            for job in jobs
            if job.host == host
        ]
        problem = None if isinstance(each, HostAnswer) else asdict(each)
        rows.append({"host": host, "problem": problem, "jobs": mine})
    return rows


def tell_problems(problems: Mapping[str, Problem], what: str = "") -> None:
    """Say which hosts did not answer, and what can be done about it. `what`: said before why."""
    for host, problem in problems.items():
        print_err(f"distrun: error: {host}: {what}{problem.text}\n")
        for line in problem.fix.splitlines():
            print_err(f"distrun: hint: {line}\n")


def engine_of(name: str, options: Mapping[str, Any], env: Mapping[str, str]) -> QueueBackend | None:
    """Return the backend of an engine, told what the options and the configuration file say; None if it is none.

    Raises:
        UsageError: there is no such launcher, or the file cannot be read.
    """
    from distrun import backends, jobfile  # for engines only
    from distrun.request import EngineOptions
    from distrun.requesting import engines

    backend = backends.load(name) if name else None
    if backend is None or not backend.is_engine:
        return None
    found = cast("QueueBackend", backend)
    own = {row.key: options[row.key] for row in SITE if options[row.key]}
    found.engine.options = EngineOptions(own=own, config=jobfile.configured(name, env, engines))
    return found


def report(outcome: Outcome, folder: JobFolder, as_json: bool, console: Console) -> Sequence[str]:
    """Say how the job ended; return the last lines of the task that ended it."""
    tail: Sequence[str] = ()
    if outcome.exit_code:
        from distrun.dashboard.text import clean_lines

        text, tail = failure(outcome, folder)
        if text:
            console.write_err(clean_lines(text) + "\n")
        console.write_err(f"distrun: error: {outcome.message}\n")
    if as_json:
        import json

        console.write_out(json.dumps(folder.outcome_json(outcome)) + "\n")
    return tail


def failure(outcome: Outcome, folder: JobFolder) -> tuple[str, Sequence[str]]:
    """Return the report of a failed job, and the last lines of the task that ended it."""
    from distrun import report

    task = outcome.culprit.task if outcome.culprit is not None else ""
    tail = folder.tail(task, report.READ_LINES) if task else []
    return report.failure(outcome, tail, str(folder.log_path(task)) if task else ""), tail
