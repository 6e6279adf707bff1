"""A script or program that is not there, a syntax error and a missing module are told before anything is started."""

from __future__ import annotations

import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest
from distrun_cli import Distrun
from lab import Site

from distrun import scriptcheck
from distrun.request import JobRequest
from distrun.sync.rules import CopyRules, Extra

LOCAL = ("launch", "-n", "1", "-s", "0", "--launcher", "local")
COPIED = ("launch", "-n", "1", "-s", "0", "--hosts", "d1", "--sync-dst-dir", "/x")


@pytest.fixture
def folder(distrun: Distrun) -> Distrun:
    (distrun.work / "train.py").write_text("print('trained')\n")
    (distrun.work / "wrong.py").write_text("import os\nif x = 1:\n    pass\n")
    return distrun


def test_a_script_that_is_not_there_is_told_with_one_of_a_near_name(folder: Distrun) -> None:
    done = folder.answer(*LOCAL, sys.executable, "-uW", "ignore", "trian.py", "--lr", "1")
    assert done.returncode == 2
    assert b"there is no trian.py in " in done.stderr
    assert b"did you mean train.py?" in done.stderr
    assert not folder.jobs
    done = folder.answer(*COPIED, "--dry-run", "python3", "trian.py")
    assert done.returncode == 0
    assert b", which is copied to the hosts (did you mean train.py?)" in done.stderr


def test_a_script_that_is_only_in_the_container_of_a_python_is_not_missed(folder: Distrun) -> None:
    (folder.work / "inner").mkdir()
    (folder.work / "inner" / "inner.py").write_text("print('inside')\n")
    (folder.work / "python3").write_text(f'#!/bin/sh\ncd inner && exec 3>&- && exec {sys.executable} "$@"\n')
    (folder.work / "python3").chmod(0o755)
    done = folder.run(*LOCAL, "--no-prefix", "./python3", "inner.py")
    assert (done.returncode, done.stdout) == (0, b"inside\n"), done.stderr
    done = folder.run(*LOCAL, "--no-prefix", "--activate", "true", "./python3", "inner.py")
    assert (done.returncode, done.stdout) == (0, b"inside\n"), done.stderr
    assert folder.run(*LOCAL, "./python3", "iner.py").returncode == 2


def test_an_archive_and_a_compiled_script_have_no_syntax_error(folder: Distrun) -> None:
    zipfile.ZipFile(folder.work / "train.pyz", "w").write(folder.work / "train.py", "__main__.py")
    py_compile.compile(str(folder.work / "train.py"), str(folder.work / "train.pyc"))
    for name in ("train.pyz", "train.pyc"):
        assert folder.run(*LOCAL, "--no-prefix", sys.executable, name).stdout == b"trained\n"


def test_a_syntax_error_is_told_with_its_place(folder: Distrun) -> None:
    done = folder.answer(*LOCAL, sys.executable, "wrong.py")
    assert done.returncode == 2
    assert done.stderr.startswith(b"wrong.py:2:4: SyntaxError: invalid syntax")
    assert b"\n  if x = 1:\n     ^\ndistrun: error: 1 error in the script\n" in done.stderr
    assert not folder.jobs


def test_what_another_python_may_take_is_a_warning(folder: Distrun) -> None:
    done = folder.answer(*COPIED, "--dry-run", "python3", "wrong.py")
    assert done.returncode == 0
    assert b"warning: wrong.py:2:4: SyntaxError: invalid syntax" in done.stderr


def test_what_an_activated_python_or_a_folder_beside_the_copy_may_have_is_no_error(folder: Distrun) -> None:
    (folder.work / "venv" / "bin").mkdir(parents=True)
    done = folder.answer(*LOCAL, "--activate", "venv:venv", "--dry-run", "python3", "wrong.py")
    assert b"(by this Python)" in done.stderr
    assert b"there is no" not in folder.answer(*COPIED, "--dry-run", "python3", "../new.py").stderr


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", "print('trained')", "nothing.py"),
        (sys.executable, "-m", "train"),
        (sys.executable, "train.py", "nothing.py"),
        ("sh", "-c", "cp train.py new.py; exec python3 new.py"),
    ],
)
def test_other_commands_are_not_looked_at(command: tuple[str, ...], folder: Distrun) -> None:
    done = folder.run(*LOCAL, "--no-prefix", *command)
    assert (done.returncode, done.stdout) == (0, b"trained\n")


def test_a_script_that_setup_brings_is_not_missed(folder: Distrun) -> None:
    done = folder.run(*LOCAL, "--no-prefix", "--setup", "cp train.py new.py", sys.executable, "new.py")
    assert (done.returncode, done.stdout) == (0, b"trained\n"), done.stderr


def test_a_script_that_activation_might_bring_is_looked_for_after_it(folder: Distrun) -> None:
    words = (*LOCAL, "--no-prefix", "--activate", "cp train.py one.py", sys.executable)
    done = folder.run(*words, "tow.py")
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"there is no tow.py in {folder.work} on ".encode() in done.stderr
    assert b"-> did you mean one.py?" in done.stderr
    assert folder.run(*words, "one.py").stdout == b"trained\n"


def test_a_program_that_is_not_there_is_told_with_one_of_a_near_name(folder: Distrun) -> None:
    (folder.work / "train.sh").write_text("true\n")
    for words, near in (("/bin/shh", "/bin/sh"), ("./trian.sh", "./train.sh"), ("mkdirr -p x", "mkdir")):
        done = folder.run(*LOCAL, *words.split())
        assert done.returncode == 127
        assert f"there is no program {words.split()[0]} on " in done.stderr.decode()
        assert f"-> did you mean {near}?" in done.stderr.decode()


def test_a_script_in_the_place_of_a_program_is_not_compared_with_programs(folder: Distrun) -> None:
    done = folder.run(*LOCAL, "train.py")
    assert done.returncode == 127
    assert b"did you mean" not in done.stderr  # strip
    assert b"hint: train.py is a file of this directory" in done.stderr


def test_a_program_that_activation_puts_on_the_path_is_not_missed(folder: Distrun) -> None:
    (folder.work / "bin").mkdir()
    (folder.work / "bin" / "own").symlink_to("/bin/true")
    assert folder.run(*LOCAL, "own").returncode == 127
    assert folder.run(*LOCAL, "--activate", "PATH=$PWD/bin:$PATH", "own").returncode == 0


def imported(folder: Path, text: str, *extra: Extra) -> dict[str, str]:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "train.py").write_text(text)
    rules = CopyRules(extra=extra) if extra else None
    asked = JobRequest((f"{sys.executable} -u sub/train.py --lr 1\n",), 1, 0, str(folder), sync_rules=rules)
    return dict(scriptcheck.imports(asked))


def test_what_a_script_imports_in_any_case_is_found(tmp_path: Path) -> None:
    text = "import os, torch.nn\nfrom yaml import x\ntry:\n import a\nexcept ImportError:\n pass\nif x:\n import b\n"
    places = {"os": "sub/train.py:1", "torch": "sub/train.py:1", "yaml": "sub/train.py:2"}
    assert imported(tmp_path, text) == places
    (tmp_path / "sub" / "yaml.py").touch()
    assert "yaml" not in imported(tmp_path, text)
    (tmp_path / "lib" / "torch").mkdir(parents=True)
    assert "torch" in imported(tmp_path, text)
    assert imported(tmp_path, text, Extra("/x", "torch.py")) == {"os": "sub/train.py:1"}
    for brings in (
        "sys.path.insert(0, 'x')",
        "import yaml",
        "def f():\n subprocess.run()",
        "os.system('x')",
        "exit()",
    ):
        assert imported(tmp_path, f"import os\n{brings}\nimport own\n") == {"os": "sub/train.py:1"}, brings
    assert imported(tmp_path, "if x = 1:\n") == {}
    assert scriptcheck.imports(JobRequest(("python3", "nowhere/train.py"), 1, 0, str(tmp_path))) == {}


def test_a_module_that_is_missing_is_told_before_the_script_runs(folder: Distrun) -> None:
    (folder.work / "train.py").write_text("import zipfile\nimport no_such_module\nprint('trained')\n")
    words = (*LOCAL, "--check-imports", "--no-prefix", sys.executable, "train.py")
    done = folder.run(*words)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"has no module no_such_module (train.py:2)" in done.stderr
    assert b" -m pip install no_such_module" in done.stderr
    brings = "mkdir -p lib && touch lib/no_such_module.py && export PYTHONPATH=$PWD/lib"
    done = folder.run(*words[:-2], "--setup", brings, *words[-2:])
    assert (done.returncode, done.stdout) == (0, b"trained\n"), done.stderr


def test_to_look_for_modules_runs_nothing_and_takes_nothing_of_a_pipe(folder: Distrun) -> None:
    (folder.work / "json.py").write_text("open('ran', 'w')\n")
    (folder.work / "sub").mkdir()
    os.mkfifo(folder.work / "pipe")
    (folder.work / "sub" / "train.py").write_text("import os\n")
    words = (*LOCAL, "--check-imports", "--dry-run", sys.executable, "pipe")
    assert folder.answer(*words).returncode == 0
    assert folder.run(*words[:-3], *words[-2:-1], "sub/train.py").returncode == 0
    assert not (folder.work / "ran").exists()


def test_a_command_whose_imports_cannot_be_checked_is_told(folder: Distrun) -> None:
    done = folder.answer(*LOCAL, "--check-imports", "--dry-run", "python3 train.py | cat")
    assert b"warning: --check-imports: nothing is checked" in done.stderr


def test_what_hosts_lack_is_told_before_files_are_copied(lab: Site) -> None:
    (lab.work / "train.py").write_text("import json\nimport no_such_module\n")
    (lab.work / "own").write_text("#!/bin/sh\necho runs\n")
    (lab.work / "own").chmod(0o755)
    words = ("launch", "-n", "2", "-s", "0", "--hosts", "h1,h2", "--sync-dst-dir", "/tmp/copied", "--no-prefix")
    done = lab.distrun(*words, "pyhton3", "train.py")
    assert done.code == 127
    assert "h1, h2  program  there is no program pyhton3 on HOST (in no folder of the tasks' PATH)" in done.err
    done = lab.distrun(*words, "--check-imports", "python3", "train.py")
    assert done.code == 2
    assert "has no module no_such_module (train.py:2)" in done.err
    assert "-m venv ~/venv && ~/venv/bin/pip install no_such_module" in done.err
    assert lab.run("ssh", "h1", "ls", "-A", "/tmp/copied").out.split() == [".distrun-sync"]
    done = lab.distrun(*words, "./onw")
    assert done.code == 127
    assert "h1, h2  program  there is no program ./onw on HOST, and the files that are copied have none" in done.err
    assert lab.run("ssh", "h1", "ls", "-A", "/tmp/copied").out.split() == [".distrun-sync"]
    (lab.work / "python3").write_text('#!/bin/sh\nexec /usr/bin/env python3 "$@"\n')
    (lab.work / "python3").chmod(0o755)
    done = lab.distrun(*words, "--check-imports", "./python3", "train.py")  # it comes with the files
    assert done.code == 2
    assert "has no module no_such_module (train.py:2)" in done.err
    done = lab.distrun(*words[:5], "-H", lab.hosts_file("h1 workdir=/tmp", "h2 workdir=/tmp"), "python3", "train.py")
    assert done.code == 2
    assert "h1, h2  script  there is no train.py in /tmp on HOST" in done.err
    assert "-> copy it there with --sync-dst-dir DIR, or mount it" in done.err
    done = lab.distrun(*words, "./own")
    assert (done.code, done.out) == (0, "runs\nruns\n"), done.err


def test_a_script_that_only_hosts_have_runs_if_the_copy_leaves_it_there(lab: Site) -> None:
    (lab.work / "other.py").touch()
    words = ("launch", "-n", "2", "-s", "0", "--hosts", "h1,h2", "--sync-dst-dir", "/tmp/only", "--no-prefix")
    script = ("python3", "sub/host.py")
    there = "mkdir -p /tmp/only/sub && touch /tmp/only/.distrun-sync && echo 'print(\"there\")' >/tmp/only/sub/host.py"
    assert lab.run("ssh", "h1", there).code == 0
    done = lab.distrun(*words, *script)
    assert done.code == 2
    assert f"warning: there is no sub/host.py in {lab.work}, which is copied to the hosts" in done.err
    absent = "there is no sub/host.py in /tmp/only on h2, and the files that are copied have none"
    assert f"h2 cannot run the command: {absent}" in done.err
    assert lab.run("ssh", "h1", "ls /tmp/only").out.split() == ["sub"]
    assert lab.run("ssh", "h2", there).code == 0
    done = lab.distrun(*words, *script)
    assert (done.code, done.out) == (0, "there\nthere\n"), done.err
    done = lab.distrun(*words, "--sync-delete", *script)
    assert done.code == 2
    text = "there is no sub/host.py in /tmp/only on HOST after the copy, because --sync-delete deletes it"
    assert f"h1, h2  script  {text}" in done.err
    done = lab.distrun(*words, "--sync-delete", "--sync-exclude", "/sub/", *script)
    assert (done.code, done.out) == (0, "there\nthere\n"), done.err
    (lab.work / "sub").mkdir()
    (lab.work / "sub" / "host.py").write_text("print('here')\n")
    done = lab.distrun(*words, "--sync-exclude", "host.py", *script)
    assert (done.code, done.out) == (0, "there\nthere\n"), done.err
    done = lab.distrun(*words[:-2], "/tmp/own", "--sync-exclude", "host.py", *script)
    assert done.code == 2
    assert "h1, h2  script  there is no sub/host.py in /tmp/own on HOST, and the files that are copied have" in done.err
    assert lab.distrun(*words, *script).out == "here\nhere\n"
