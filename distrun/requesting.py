"""From options to the request of a job: what the command line, job files and Python give.

    Request(["python", "train.py"], workers=2, servers=1, hosts=["h1", "h2"], env={"OMP_NUM_THREADS": 4}, timeout=600)

The options are those of `distrun launch`, by the keys of job files. `make` reads what they name, such as hosts files,
and returns the checked request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import formats
from distrun.errors import UsageError
from distrun.options import (
    BY_KEY,
    COPYING,
    HOSTS,
    LAUNCHER,
    MERGED,
    ROWS,
    WORDS,
    Layer,
    Option,
    Sourced,
    decide,
    members,
)
from distrun_runtime.contract import environ, facts
from distrun_runtime.contract.plan import ROLES, SERVER, WORKER, Limits

if TYPE_CHECKING:
    from distrun.hosts import Inventory
    from distrun.request import EngineOptions, JobRequest, Setting
    from distrun.sync.rules import CopyRules

Say = Callable[[str, str], None]
"""Takes what the user should know, and its level: "info", "warning", "debug"."""
FULL_TRACEBACKS = 2
"""From this verbosity on workers print whole tracebacks."""


class Request:
    """A job that is to be launched, by `Jobs.launch`: its command, and the options of `distrun launch`.

    All options are checked when a request is made; the files that they name are read when it is launched.

    Args:
        command: the command. Its words are executed exactly; one text with blanks is run by bash.
        workers: number of workers; None: the job file's, or 1.
        servers: number of servers; 0: none; None: the job file's, or as many as workers.
        hosts: hosts by ssh, a text as for `--hosts` or one for each; None: this machine, if no other option or
            variable names hosts.
        env: variables of all tasks, with the values that `[env]` of a job file may have.
        detach: the job goes on when this process ends.
        file: a job file, which gives what no other argument does.
        profile: a profile of that file.
        **options: any other key of a job file, with `_` for `-`: `timeout=60`, `worker={"cores": 2}`. Paths may be
            `Path`s.

    Raises:
        UsageError: an option does not exist or has a wrong value, or the file is wrong; the message has all mistakes.
    """

    def __init__(
        self,
        command: str | Sequence[str] = (),
        *,
        workers: int | None = None,
        servers: int | None = None,
        hosts: str | Sequence[str] | None = None,
        env: Mapping[str, object] | None = None,
        detach: bool | None = None,
        file: str | os.PathLike[str] = "",
        profile: str = "",
        **options: object,
    ) -> None:
        from distrun import jobfile

        own = {"workers": workers, "servers": servers, "hosts": hosts, "env": env, "detach": detach, **options}
        data = {name.replace("_", "-"): _as_toml(value, name) for name, value in own.items() if value is not None}
        if command:
            data["command"] = _as_toml(command)
        own_layer, default = jobfile.layer(data, "Request"), {"workers": Sourced("1", "default")}
        self.given: Layer = decide([own_layer, *jobfile.layers(file, profile), default])
        """What was given, by the keys of options."""

    def resolve(self, say: Say) -> JobRequest:
        """Return the checked request. Reads the files that options name. `say`: takes notes for the user.

        Raises:
            UsageError: an option, or what it names, is wrong.
        """
        from distrun import jobfile

        options = {row.key: row.default for row in ROWS}
        for key, (value, *_) in self.given.items():
            if key in BY_KEY:
                options[key] = BY_KEY[key].read(value) if isinstance(value, (str, tuple)) else value
        try:
            return resolve(self.given, options, say)
        except UsageError as err:
            raise jobfile.placed(err, self.given) from err


def _as_toml(value: object, name: str = "") -> Any:
    """Return a value in the types that TOML has. `name`: of a table of options, which may have `_` for `-`."""
    if isinstance(value, Mapping):
        return {
            str(key).replace("_", "-") if name in ROLES else str(key): _as_toml(each) for key, each in value.items()
        }
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_as_toml(each) for each in value] if isinstance(value, (list, tuple)) else value


REACH = (*HOSTS, LAUNCHER)
"""Options by which hosts are named and reached."""
PYTHON = (BY_KEY["python"], BY_KEY["activate"])
"""Options that say which Python tasks find."""


def engines() -> Sequence[str]:
    """Return the names of all launchers, each of which may have a section in the user's file."""
    from distrun import backends

    return backends.names()


def current_folder() -> str:
    """Return the path of the current directory.

    Raises:
        UsageError: it was removed.
    """
    try:
        return os.getcwd()
    except OSError as err:
        raise UsageError("the current directory does not exist any more", "cd to one that does") from err


def reach_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what `Backend.reach` takes of a command's options; empty ones are left out."""
    found = {"transport": str(options["transport"]), "connect_s": formats.exact(options["connect_timeout"])}
    if options["strict_host_keys"]:
        found["strict"] = "yes"
    if options["ssh_config"]:
        found["config"] = str(options["ssh_config"])
    return found


def typed(options: Mapping[str, Any], inventory: Inventory | None, rows: Iterable[Option] = REACH) -> list[str]:
    """Return the words that give another command these options; by default those by which it reaches the same hosts."""
    words: list[str] = []
    if options["hostfile"] == "-" and inventory is not None:
        from distrun.hosts.ranges import fold

        # What was on standard input has been read.
        options = {**options, "hostfile": None, "hosts": inventory.as_list() or fold(inventory.names)}
    for row in rows:
        value = options.get(row.key, row.default)
        if value == row.default:
            continue
        values = value if row.kind == WORDS else (value,)
        for each in values:
            words.append(row.name.split("/")[0])
            if each is not True:
                words.append(f"{each:g}" if isinstance(each, float) else each)
    return words


def find_hosts(options: Mapping[str, Any], env: Mapping[str, str]) -> Inventory | None:
    """Return the hosts that the options, or else the environment, name; None if there are none.

    Raises:
        HostsError: what names them cannot be read or understood.
    """
    from distrun.hosts import parse

    return parse.find(options["hostfile"], options["hosts"], env, form=options["hostfile_format"])


def command_of(given: Layer) -> tuple[str, ...]:
    """Return the words of the command that was given; none if there is none."""
    if "run" in given:
        return (given["run"].value,)
    return tuple(given["command"].value) if "command" in given else ()


def resolve(given: Layer, options: Mapping[str, Any], say: Say) -> JobRequest:
    """Return the request of a job. Reads the files that options name.

    Arguments:
        given: what was given of the options, and the command.
        options: all options of the table, by key.
        say: takes notes for the user.

    Raises:
        UsageError: an option, or what it names, is wrong.
    """
    env = environ.snapshot()
    launcher, found = launcher_of(options, env, say)
    for warning in found.warnings if found else ():
        say(warning, "warning")  # before anything else can fail: it may be why
    options = {**options, "shell": "run" in given or options["shell"]}
    known = record(given, found, say)
    return make(command_of(given), options, say, launcher=launcher, found=found, env=env, given=known)


def make(
    command: tuple[str, ...],
    options: Mapping[str, Any],
    say: Say,
    *,
    launcher: str,
    found: Inventory | None,
    env: Mapping[str, str],
    given: Mapping[str, Any],
) -> JobRequest:
    """Return the request of a job. Reads the files that options name.

    Arguments:
        command: its words.
        options: all options of the table, by key.
        say: takes notes for the user.
        launcher, found: as `launcher_of` returns them.
        env: the environment of this process.
        given: what the job's record has of the options (`record`).

    Raises:
        UsageError: an option, or what it names, is wrong.
    """
    from distrun import backends
    from distrun.request import JobRequest, Setting, forwarded
    from distrun.request import given as given_to

    settings, notes = _collect_env(options, env)
    for note in notes:
        say(note, "warning")
    if not options["no_forward"] and not backends.load(launcher).inherits_env:
        # First: what the user gives by name wins.
        settings = (*forwarded(env), *settings)
    if options["verbosity"] >= FULL_TRACEBACKS:
        settings = (Setting("DISTRUN_TRACEBACK", "full"), *settings)
    named = given_to(settings, "").get("DMLC_INTERFACE")
    interface = options["interface"] or (environ.text("DMLC_INTERFACE", env) if named is None else named.value)
    asked = members(options)
    engine = asked.pop("engine")
    limits = Limits(**asked["limits"])
    start_s = options["start_timeout"]
    asked.update(
        launcher=launcher,
        servers=options["workers"] if options["servers"] is None else options["servers"],
        interface=interface,
        sync_dst_dir="" if launcher == "local" else options["sync_dst_dir"],
        limits=limits._replace(
            suspect_s=limits.suspect_s if "suspect_after" in given else min(limits.suspect_s, limits.lost_s),
            lease_s=facts.LEASE_FACTOR * limits.lost_s,
            start_s=limits.start_s if start_s is None else start_s,
        ),
    )
    if options["activate"] or options["setup"]:
        from distrun import activation

        asked["activate"] = activation.script(options["activate"], setup=options["setup"])
        asked["activated"] = None if options["setup"] else activation.folders(options["activate"])
    return JobRequest(
        **asked,
        command=command,
        hosts=found,
        reach=reach_options(options),
        outer=env,
        cwd=current_folder(),
        settings=settings,
        sync_rules=_rules(options),
        engine=_engine(engine, launcher, env),  # after all that was typed: it may read a site's file
        # The command that examines the hosts of a launch, and can make what their servers lack (--fix).
        doctor=""
        if backends.load(launcher).is_engine
        else formats.join(["distrun", "doctor", *typed(options, found, (*REACH, *PYTHON))]),
        given=given,
        dry_run=options["dry_run"],
    )


def record(given: Layer, found: Inventory | None, say: Say) -> dict[str, Any]:
    """Return what was given in a form that may be written and launched again elsewhere: no secrets, whole paths."""
    from distrun.request import without_secrets

    record: dict[str, Any] = {}
    for key, (value, origin, _) in given.items():
        row = BY_KEY.get(key)
        if row is None:
            record[key] = value
        elif key in MERGED:
            record[key], lost = without_secrets(key, map(_whole_file, value) if key == "env" else value)
            if lost and key != "env":
                names = ", ".join(lost)
                say(f"{row.name}: the value of {names} is not recorded; for a rerun, give it again", "debug")
        elif key == "hostfile" and value == "-":
            listed = found.as_list() if found is not None else ""  # what was on standard input has been read
            record["hosts" if listed else key] = listed or value
        elif not row.typed_only and origin not in environ.BY_NAME:
            record[key] = _whole(value) if row.is_path else value
    if "hosts" in record and "hostfile" in given:
        record.pop("hostfile_format", None)  # it was that of the file
    return record


def _whole_file(word: str) -> str:
    """Return a word of --env with the whole path of the file that it names, if it names one."""
    from distrun.request import FILED

    filed = re.match(FILED, word, re.DOTALL)
    return f"{filed[1]}@{os.path.abspath(filed[2])}" if filed else word


def _whole(paths: Any) -> Any:
    return os.path.abspath(paths) if isinstance(paths, str) else tuple(map(os.path.abspath, paths))


def _collect_env(options: Mapping[str, Any], outer: Mapping[str, str]) -> tuple[tuple[Setting, ...], list[str]]:
    """Return all settings in the order of precedence, files first, and notes for the user. Reads the files."""
    from distrun.request import parse_env, parse_env_file, parse_role_env, read_text

    settings: list[Setting] = []
    for path in options["env_files"]:
        settings += parse_env_file(read_text("--env-file", path), path)
    named, notes = parse_env(options["env"], outer)
    settings += named
    for role in ROLES:
        if options["env_" + role]:
            settings += parse_role_env(role, options["env_" + role])
    return tuple(settings), notes


def _engine(asked: Mapping[str, Any], launcher: str, env: Mapping[str, str]) -> EngineOptions:
    """Return what the options, and the configuration file, say to an engine. Reads the file if it is one."""
    from distrun.request import EngineOptions, Needs

    parts = {
        WORKER: Needs(**asked[WORKER]),
        SERVER: Needs(**asked[SERVER]),
        "own": {name: value for name, value in asked["own"].items() if value},
        "config": {},
    }
    if launcher not in ("local", "ssh"):
        from distrun import jobfile

        parts["config"] = jobfile.configured(launcher, env, engines)
    return EngineOptions(**{**asked, **parts})


def _rules(options: Mapping[str, Any]) -> CopyRules | None:
    if not options["sync_dst_dir"]:
        for row in COPYING[1:]:
            if options[row.key]:
                raise UsageError(
                    f"{row.name}: nothing is copied without --sync-dst-dir", "add --sync-dst-dir DIR, or leave it out"
                )
        return None
    from distrun.sync.rules import check_folder, make_rules

    check_folder(options["sync_dst_dir"])
    return make_rules(
        [*_private([*options["env_files"], *_filed(options["env"])], current_folder()), *options["sync_exclude"]],
        options["sync_gitignore"],
        options["sync_extra"],
        cwd=current_folder(),
        delete=options["sync_delete"],
    )


def _filed(words: Sequence[str]) -> list[str]:
    """Return the files that words of --env name."""
    from distrun.request import FILED

    return [match[2] for word in words if (match := re.match(FILED, word, re.DOTALL))]


def _private(paths: Sequence[str], cwd: str) -> list[str]:
    """Return patterns that keep --env-file files below `cwd` from being copied: their values are to stay hidden."""
    from distrun.sync.rules import literal

    names = [os.path.relpath(os.path.realpath(path), os.path.realpath(cwd)) for path in paths]
    return ["/" + literal(name) for name in names if not name.startswith("..")]


def launcher_of(options: Mapping[str, Any], env: Mapping[str, str], say: Say) -> tuple[str, Inventory | None]:
    """Return the backend's name and the hosts: the one that was named; ssh when hosts are given; else local."""
    from distrun import backends

    named: str = options["launcher"]
    if named == "local":
        if options["hostfile"] not in (None, "-"):
            from distrun.hosts import parse

            parse.read(options["hostfile"])  # one that is not there is a mistake all the same
        for option, given in (("-H/--hostfile", options["hostfile"]), ("--hosts", options["hosts"])):
            if given is not None:
                say(f"{option} is ignored: --launcher local runs on this machine", "info")
        if options["sync_dst_dir"]:
            say("--sync-dst-dir is ignored: --launcher local runs in the current directory", "info")
        return named, None
    backend = backends.load(named) if named else None
    if backend is not None and backend.is_engine and not backend.needs_hosts:
        # What the environment says of an outer job is the engine's own business.
        return backend.name, find_hosts(options, {})
    found = find_hosts(options, env)
    launcher = named or ("local" if found is None else "ssh")
    if found is None and (backend or backends.load(launcher)).needs_hosts:
        raise UsageError(f"--launcher {launcher}: no hosts are given", "name some with -H FILE or --hosts A,B")
    if found is None and options["sync_dst_dir"]:
        say("--sync-dst-dir is ignored: without hosts, the job runs in the current directory", "info")
    return launcher, found
