"""Job files: what is read from them, what is wrong in them, and that what is written is read as the same."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from distrun import backends, jobfile, requesting
from distrun.cli import launch as command
from distrun.errors import PlacedError
from distrun.options import (
    BY_KEY,
    COUNT,
    FLAG,
    MERGED,
    ROWS,
    SECONDS,
    SIZE,
    SWITCH,
    TIMES,
    WORDS,
    Option,
    Sourced,
    decide,
)
from distrun.request import JobRequest

FOLDER = Path("/w")


def read(text: str, **more: Any) -> dict[str, Any]:
    return {key: each.value for key, each in jobfile.parse(text, "job.toml", FOLDER, **more).layer.items()}


def wrong(text: str, **more: Any) -> str:
    with pytest.raises(PlacedError) as caught:
        read(text, **more)
    assert caught.value.count == str(caught.value).count("job.toml:")
    return str(caught.value)


def test_values_become_what_would_be_typed() -> None:
    text = """
        workers = 4
        timeout = 1.5
        hosts = ["a", "b"]
        command = "python train.py > out"
        detach = true
        log-limit = 2_000_000
        worker.memory = "8G"
        server = {import = ["rules"], device = "gpu"}
        [scheduler.env]
        B = "2"
        [env]
        A = 1
        KEY = {file = "key.txt"}
        "AWS_*" = {forward = true}
    """
    assert read(text) == {
        **{"workers": "4", "timeout": "1.5", "hosts": "a,b", "command": ("python train.py > out",), "detach": True},
        **{"log_limit": "2000000", "worker_memory": "8G", "server_imports": ("rules",), "server_device": "gpu"},
        **{"env": ("A=1", "KEY@/w/key.txt", "AWS_*"), "env_scheduler": ("B=2",)},
    }


def test_paths_are_relative_to_the_files_folder() -> None:
    assert read('hostfile = "hosts"\nenv-file = ["../a.env", "/b.env"]') == {
        "hostfile": "/w/hosts",
        "env_files": ("/a.env", "/b.env"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers = 1\nworkrs = 2", "job.toml:2:1: unknown key 'workrs': did you mean workers?\n  workrs = 2\n  ^"),
        ('run = """\nnmae = 1\n"""\n  nmae = 1', "job.toml:4:3: unknown key 'nmae': did you mean name?\n    nmae = 1"),
        ("num-workers = 1", "job.toml:1:1: unknown key 'num-workers': did you mean workers?"),
        ("worker_cores = 1", "unknown key 'worker_cores': did you mean cores in [worker]?"),
        ("[worker]\nname = 'x'", "job.toml:2:1: unknown key 'name' in [worker]: did you mean name, above all tables?"),
        ("[wroker]\ncores = 1", "job.toml:1:2: unknown table [wroker]: did you mean [worker]?"),
        ("[slurm]\nargs = 'x'", "job.toml:1:2: unknown table [slurm]: an engine's section is read from ~/.config/"),
        ("dry-run = true", "unknown key 'dry-run'"),
        (
            'workers = "4"',
            'job.toml:1:11: workers: expected a whole number without quotes, found "4"\n  workers = "4"\n            ^',
        ),
        ("workers = 0", "job.toml:1:11: workers: expected a whole number from 1 to 65536, found '0'"),
        ("workers = true", "workers: expected a whole number, found true"),
        ("timeout = inf", "timeout: expected a number of seconds, found inf"),
        ("detach = 1", "job.toml:1:10: detach: expected true or false, found 1"),
        ("verbose = -1", "verbose: expected a whole number, found -1"),
        ("name = 1979-05-27", "name: expected a text in quotes, found 1979-05-27"),
        ("activate = [1]", "activate: expected texts in brackets, found [1]"),
        ('transport = "ssh"', "transport: expected fabric or openssh, found 'ssh'"),
        ("worker = 4", "job.toml:1:10: worker: expected a table, [worker]; how many there are is workers = N"),
        ("command = []", "command: expected a command: texts in brackets, or one text, found []"),
        ("command = 'a'\nrun = 'b'", "job.toml:2:1: run and command contradict each other"),
        ("env.A = [1]", 'job.toml:1:9: A: expected a text, a number, {file = "PATH"} or {forward = true}, found [1]'),
        ("env = {A = {fil = 'x'}}", 'found {fil = "x"}'),
        ("worker.env.A = {file = 'x'}", "A: expected a text or a number, found"),
        ("env.RANK = 1", "job.toml:1:12: env: RANK is set by distrun itself"),
        ("env = 1", "env: expected a table, found 1"),
        ("profile = 1", "job.toml:1:11: expected tables, such as [profile.lab]"),
        ("[profile]\nlab = 1", "job.toml:2:7: expected a table: [profile.lab]"),
        ("[profile.lab]\nprofile = 1", "job.toml:2:1: unknown key 'profile'\n"),
        ("[profile.lab]\nworkrs = 1", "job.toml:2:1: unknown key 'workrs': did you mean workers?"),
        ('name = "x', "job.toml:1:10: "),
        ('detach = "true"', 'detach: expected true or false without quotes, found "true"'),
        ("launcher = local", "job.toml:1:12: expected a text in straight quotes, a number, true, false, [ or {\n"),
        ("name = 'x'\nname = 'y'", "job.toml:2:11: this key is already above\n"),
        ('name = "x\n', "job.toml:1:10: expected a quote before the end of the line\n"),
        ('command = ["a" "b"]', "job.toml:1:16: expected a comma or ]\n"),
        ("[enviroment]\nA = 1", "unknown table [enviroment]: did you mean [env]?"),
        ("workers = 2.5", "workers: expected a whole number, found 2.5"),
        (
            "[env]\nA = 1\nworkers = 2",
            "job.toml:3:1: workers is an option: move it above all tables; if you mean a variable, quote its name:"
            ' "workers"\n  workers = 2\n  ^',
        ),
        ("[env]\nhosts = ['a']", "job.toml:2:1: hosts is an option: move it above all tables;"),
        ("[env]\nrun = 'a'", "job.toml:2:1: run is an option: move it above all tables;"),
        ("[env]\nnum-workers = 2", "job.toml:2:1: num-workers is an option: move it above all tables;"),
        ("[env]\nsync_dst_dir = '~/x'", "job.toml:2:1: sync_dst_dir is an option: move it above all tables;"),
        ("A_B = 1", "job.toml:1:1: unknown key 'A_B': variables are below [env]\n"),
        ("[worker]\nA = 1", "job.toml:2:1: unknown key 'A' in [worker]: variables are below [worker.env]\n"),
        ("workers: 1", "job.toml:1:8: expected KEY = VALUE\n"),
        ("workers = 1,", "job.toml:1:12: expected the end of the line after the value\n"),
        ("[server.env]\n  cores = 2", "job.toml:2:3: cores is an option: move it into [server];"),
        ("[worker.env]\nworkers = 2", "job.toml:2:1: workers is an option: move it above all tables;"),
        ("[profile.x.env]\nworkers = 2", "job.toml:2:1: workers is an option: move it into [profile.x];"),
        ("[profile.x.worker.env]\ncores = 2", "job.toml:2:1: cores is an option: move it into [profile.x.worker];"),
        (
            "[slurm]\nargs = 'x'\nworkers = 2",
            "job.toml:3:1: workers is an option: move it above all tables\n  workers = 2\n  ^",
        ),
        ("[slurm]\nsync_dst_dir = '~/x'", "job.toml:2:1: sync_dst_dir is an option: move it above all tables\n"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_was_meant(text: str, message: str) -> None:
    assert message in wrong(text)


@pytest.mark.parametrize("text", ['[env]\n"name" = "x"', "[env]\n'name' = 'x'", 'env = {name = "x"}', 'env.name = "x"'])
def test_a_variable_may_be_called_as_an_option_if_it_cannot_be_a_misplaced_one(text: str) -> None:
    assert read(text) == {"env": ("name=x",)}


def test_a_variable_that_is_called_as_an_option_is_written_so_that_it_stays_a_variable() -> None:
    written = jobfile.write({"env": Sourced(("name=x", "A=1"), ""), "env_worker": Sourced(("cores=2",), "")})
    assert read(written) == {"env": ("name=x", "A=1"), "env_worker": ("cores=2",)}


def test_all_mistakes_of_a_file_are_told_in_their_order() -> None:
    told = wrong("[worker]\nx = 1\n[env]\nA = true\n[nothing]")
    assert [line.split(":")[1] for line in told.splitlines() if line.startswith("job.toml")] == ["2", "4", "5"]


def test_an_engines_section_is_texts_and_only_in_the_users_file() -> None:
    text = "workers = 2\n[slurm]\nargs = '--comment=50%'\nshared_folders = true\nx = 3\n"
    found = jobfile.parse(text, "job.toml", FOLDER, engines=lambda: ["slurm", "sge"])
    assert found.engines == {"slurm": {"args": "--comment=50%", "shared_folders": "yes", "x": "3"}}
    assert "args: expected a text, found [1]" in wrong("[slurm]\nargs = [1]", engines=lambda: ["slurm"])


@pytest.mark.parametrize("key", ["workers", "timeout", "hosts", "queue", "command"])
def test_an_option_in_an_engines_section_is_refused_with_its_place(key: str) -> None:
    told = wrong(f"[slurm]\nargs = 'x'\n{key} = 'y'", engines=lambda: ["slurm"])
    assert f"job.toml:3:1: {key} is an option: move it above all tables\n" in told


def test_every_key_that_an_engine_reads_is_taken_though_it_may_be_called_as_an_option() -> None:
    sources = "".join(path.read_text() for path in Path(backends.__file__).parent.glob("*.py"))
    keys = set(re.findall(r'config\.get\("(\w+)"', sources))
    assert {"args", "python", "memory", "shell", "image"} < keys
    text = "[slurm]\n" + "".join(f"{key} = 'y'\n" for key in keys)
    found = jobfile.parse(text, "job.toml", FOLDER, engines=lambda: ["slurm"])
    assert found.engines == {"slurm": dict.fromkeys(keys, "y")}


def test_tables_of_other_tools_in_pyproject_toml_are_none_of_ours() -> None:
    text = "[project]\nname = 'x'\n[tool.distrun]\nworkers = 3\n[tool.distrun.profile.lab]\nservers = 1\n"
    found = jobfile.parse(text, "pyproject.toml", FOLDER, jobfile.TOOL)
    assert {key: each[:2] for key, each in found.layer.items()} == {"workers": ("3", "pyproject.toml")}
    assert [*found.profiles] == ["lab"]
    assert found.profiles["lab"]["servers"][:2] == ("1", "pyproject.toml [profile.lab]")


def test_the_first_source_wins_and_variables_of_all_hold() -> None:
    def layer(origin: str, **values: Any) -> dict[str, Sourced]:
        return {key: Sourced(value, origin) for key, value in values.items()}

    best = layer("a", workers="1", hosts="x", env=("A=1",), command=("true",))
    rest = layer("b", workers="2", servers="2", hostfile="/h", env=("A=2", "B=2"), run="false", shell=True)
    assert decide([best, rest]) == {
        **layer("a", workers="1", hosts="x", command=("true",)),
        **layer("b", servers="2"),
        "env": Sourced(("A=2", "B=2", "A=1"), "b, a"),
    }


# ---------------------------------------------------------------------- written and read again

LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
NAME = st.text(string.ascii_uppercase, min_size=1, max_size=8).map("X_".__add__)
SPECIAL = {
    "hosts": st.sampled_from(["a", "a,b", "gpu[1-3]"]),
    "subnet": st.just("10.0.0.0/8"),
    "interface": st.sampled_from(["eth0", "ib0,eth0"]),
    "port_range": st.just("4000-5000"),
    "coordinator_addresses": st.sampled_from(["a,b", "::1"]),
    "forward_signals": st.just("USR1"),
    "name": st.sampled_from(["x", "a.b"]),
    "engine_time": st.just("90m"),
    "run_dir": st.just("/r"),
    "labels": st.just(("a=b",)),
    "fetch": st.just(("out/*",)),
    "activate": st.lists(st.sampled_from(["venv:a", "x=1\ny"]), max_size=2).map(tuple),
}


def value_of(row: Option) -> st.SearchStrategy[Any]:
    """Values that an option takes, as they are typed, that contradict no other option."""
    if row.key in SPECIAL:
        return SPECIAL[row.key]
    if row.key in MERGED:
        return st.lists(
            st.tuples(NAME, LINE).map("=".join), min_size=1, unique_by=lambda word: word.partition("=")[0]
        ).map(tuple)
    if row.kind == COUNT:
        return st.integers(int(row.low or 0), 100).map(str)
    if row.kind == SECONDS:
        return st.integers(1, 10**6).map(lambda number: f"{number / 8:g}")
    if row.kind in (FLAG, SWITCH):
        return st.just(True)
    kinds = {SIZE: st.sampled_from(["100M", "all", "2G"]), TIMES: st.integers(1, 3), WORDS: st.lists(LINE).map(tuple)}
    return st.sampled_from(row.choices) if row.choices else kinds.get(row.kind, LINE)


LEFT_OUT = {"launcher", "hostfile", "hostfile_format", "env_files", "server_device", "metrics_address", "ps", "quiet"}
LEFT_OUT |= {"server_imports", "ssh_config"}
"""These are read or checked beyond their own value; and so are engines' options and those of copies."""
FREE = [
    row
    for row in ROWS
    if not (row.typed_only or row.key in LEFT_OUT or row.launchers or row.key.startswith(("sync_", "suspect", "lost")))
]
ALWAYS = {"workers": st.just("2"), "hosts": SPECIAL["hosts"]}
OPTIONS = st.fixed_dictionaries(ALWAYS, optional={row.key: value_of(row) for row in FREE if row.key not in ALWAYS})
COMMANDS = st.one_of(
    st.tuples(st.just("command"), st.lists(LINE, min_size=1).map(tuple)),
    st.tuples(st.just("run"), LINE.filter(str.strip)),
)


def request_of(layer: dict[str, Sourced], monkeypatch: pytest.MonkeyPatch) -> JobRequest:
    """The request of a launch to which all this was given."""
    monkeypatch.setattr(command.JobCommand, "layers", lambda self, ctx, typed: [layer])
    made: list[JobRequest] = []
    request = requesting.make

    def keep(*args: Any, **more: Any) -> Any:
        made.append(request(*args, **more))
        raise click.Abort

    monkeypatch.setattr(requesting, "make", keep)
    with pytest.raises(click.Abort):
        command.launch.main([], standalone_mode=False, obj={})
    monkeypatch.undo()
    return made[0]


@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(OPTIONS, COMMANDS)
@example({"workers": "2", "hosts": "a", "setup": 'a\n"""\\x"'}, ("run", '"""""'))
def test_what_is_written_gives_the_same_request(options: dict[str, Any], ran: tuple[str, Any]) -> None:
    before = {key: Sourced(each, "") for key, each in {**options, ran[0]: ran[1]}.items()}
    after = jobfile.parse(jobfile.write(before), "", FOLDER).layer
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert request_of(dict(after), monkeypatch) == request_of(before, monkeypatch)


def test_the_last_of_several_words_for_a_variable_is_written() -> None:
    assert jobfile.write({"env": Sourced(("A=1", "A", "A=2"), "")}) == '[env]\nA = "2"\n'


def test_each_key_of_a_file_is_of_one_option() -> None:
    paths = [row.path for row in ROWS]
    assert len(set(paths)) == len(paths)
    assert BY_KEY["worker_cores"].path == ("worker", "cores")
