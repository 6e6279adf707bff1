from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from distrun.errors import HostsError, UsageError
from distrun.hosts import HostSpec, parse


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(hostfile: str | None = None, listed: str | None = None, **env: str) -> tuple[str, ...] | None:
    found = parse.find(hostfile, listed, env)
    return None if found is None else found.names


def error(*words: str | None, **env: str) -> str:
    with pytest.raises(HostsError) as caught:
        parse.find(words[0], words[1], env)
    return str(caught.value)


def test_options_come_before_variables_and_those_before_the_queue(folder: Path) -> None:
    for name in ("f", "cfn", "ours", "pe"):
        (folder / name).write_text("%s%s\n" % (name, " 2 q U" if name == "pe" else ""))
    env = {
        "DEEPLEARNING_WORKERS_PATH": "cfn",
        "DISTRUN_HOSTFILE": "ours",
        "PE_HOSTFILE": "pe",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    assert names("f", None, **env) == ("f",)
    assert names(None, "a,b", **env) == ("a", "b")
    for name, expected in (
        ("DEEPLEARNING_WORKERS_PATH", ("cfn",)),
        ("DISTRUN_HOSTFILE", ("ours",)),
        ("PE_HOSTFILE", ("pe",)),
        ("SLURM_JOB_NODELIST", ("n1", "n2")),
    ):
        assert names(**env) == expected
        env[name] = ""
    assert names(**env) is None


def test_both_options_contradict_and_an_unknown_format_is_named() -> None:
    with pytest.raises(UsageError, match="contradict"):
        parse.find("f", "a", {})
    with pytest.raises(UsageError, match="expected one of auto, dmlc, mpich, horovod, sge, found 'xml'"):
        parse.find(None, "a", {}, form="xml")


def test_minus_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\xef\xbb\xbfd1\r\nd2:4\r\n")))
    assert error("-", None).startswith("<stdin>:2:3: E105: ")


def test_a_file_that_is_not_there_is_e100_with_the_ways(folder: Path) -> None:
    text = "hosts: E100: hosts file not found: 'hosts' (cwd %s). Pass -H FILE, --hosts a,b or set DISTRUN_HOSTFILE"
    assert error("hosts", None) == text % folder
    with pytest.raises(HostsError) as caught:
        parse.find(None, None, {"DISTRUN_HOSTFILE": "/nowhere/hosts"})
    assert str(caught.value).startswith("/nowhere/hosts: E100: ")
    assert caught.value.hint == "the file is named by the variable DISTRUN_HOSTFILE"


def test_a_file_that_is_no_text_or_cannot_be_read_is_e118(folder: Path) -> None:
    (folder / "program").write_bytes(b"\x7fELF\0\0")
    assert error("program", None) == "program: E118: cannot read the hosts file 'program': it is not UTF-8 text"
    assert error(".", None) == ".: E118: cannot read the hosts file '.': Is a directory"
    assert "larger than 16 MiB" in error("/dev/zero", None)
    assert "E118: cannot read the hosts file 'a\\x00b': embedded null byte" in error("a\0b", None)


def test_bytes_that_are_no_utf8_are_harmless_in_comments_and_refused_in_names(folder: Path) -> None:
    (folder / "hosts").write_bytes(b"d1 # caf\xe9\n")
    assert names("hosts") == ("d1",)
    (folder / "hosts").write_bytes(b"caf\xe9\n")
    assert error("hosts", None).startswith("hosts:1:1: E102: invalid host name 'caf\\udce9'")


def test_includes_are_read_beside_the_file_and_from_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "hosts").write_text("@include more\n@include ~/mine\n")
    (folder / "sub" / "more").write_text("d1\n")
    (folder / "mine").write_text("d2\n")
    monkeypatch.setenv("HOME", str(folder))
    assert names("sub/hosts") == ("d1", "d2")
    (folder / "mine").unlink()
    text = error("sub/hosts", None)
    assert text.startswith("sub/hosts:2:10: E100: hosts file not found: ")
    assert "Pass -H" not in text


def test_a_link_to_itself_ends(folder: Path) -> None:
    (folder / "a").write_text("@include loop/a\n")
    os.symlink(".", folder / "loop")
    assert "E117: @include: deeper than 10 files" in error("a", None)


def test_grid_engines_file_is_known_by_its_variable(folder: Path) -> None:
    (folder / "pe").write_text("n1 4 all.q@n1 UNDEFINED\nn2 2 all.q@n2 UNDEFINED\n")
    env = {"PE_HOSTFILE": str(folder / "pe")}
    for found in (parse.find(None, None, env), parse.find(str(folder / "pe"), None, env)):
        assert found.specs == (HostSpec("n1", slots=4), HostSpec("n2", slots=2))


def test_slurms_node_list_has_its_tasks_as_slots() -> None:
    env = {"SLURM_JOB_NODELIST": "n[01-03],x1", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    found = parse.find(None, None, env)
    assert found.source == "$SLURM_JOB_NODELIST"
    assert found.specs == (*(HostSpec("n0%d" % index, slots=2) for index in (1, 2, 3)), HostSpec("x1", slots=1))
    plain = parse.find(None, None, {"SLURM_JOB_NODELIST": "x[1-2]"})
    assert plain.specs == (HostSpec("x1"), HostSpec("x2"))


@pytest.mark.parametrize("tasks", ["2(x3)", "two", "0(x2)", "2(x99999999)", "2(x2),"])
def test_slurms_tasks_that_do_not_fit_are_told_and_ignored(tasks: str) -> None:
    found = parse.find(None, None, {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": tasks})
    assert found.specs == (HostSpec("n1"), HostSpec("n2"))
    (warning,) = found.warnings
    assert warning.startswith("$SLURM_TASKS_PER_NODE:1:1: W121: ")


def test_a_broken_node_list_of_slurm_names_the_variable() -> None:
    assert error(None, None, SLURM_JOB_NODELIST="n[1-") == (
        "$SLURM_JOB_NODELIST:1:2: E109: unclosed '[' in 'n[1-'\n  n[1-\n   ^"
    )


def test_a_file_is_read_as_it_stands(folder: Path) -> None:
    (folder / "hosts").write_text("d1\n")
    assert parse.read("hosts") == "d1\n"
