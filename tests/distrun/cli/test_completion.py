"""Completion, typed into real shells."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import Distrun
from terminal import Session

from distrun.completion import NAMED, answer, split

TAB, EVERY, SHOW = "\t", "\x18a", "\x07"
"""Keys. The last one also clears the line: Ctrl-U would be the terminal's own while the shell does not read."""
RC = {
    "bash": r"""
source <(distrun completion bash)
bind -x '"\C-g": printf "\n[[%s]]\n" "$READLINE_LINE"; READLINE_LINE='
bind '"\C-xa": insert-completions'
bind 'set bell-style none'
PS1='READY> '
""",
    "zsh": r"""
autoload -U compinit; compinit -u -D; eval "$(distrun completion zsh)"
show() { print -r; print -r -- "[[$BUFFER]]"; BUFFER= }; zle -N show; bindkey '^G' show
every() { _main_complete; compstate[insert]=all; compstate[list]= }; zle -C every complete-word every
bindkey '^Xa' every
unsetopt beep; PS1='READY> '
""",
}
EVIL = ["$(touch pwned)", "`touch pwned`", "a;touch pwned;", 'it\'s "x" !! *', "~x"]
"""Names that a shell would act on."""


def make_job(distrun: Distrun, job: str, name: str = "", is_over: bool = False) -> Path:
    folder = distrun.home / "state" / "distrun" / "jobs" / job
    folder.mkdir(parents=True)
    tasks = [{"name": f"worker-{rank}", "role": "worker", "host": "h1\n--all"} for rank in range(2)]
    (folder / "request.json").write_text(json.dumps({"name": name}))
    (folder / "state.json").write_text(json.dumps({"tasks": tasks}))
    if is_over:
        (folder / "outcome.json").touch()
    return folder


class Shell:
    """A shell in which somebody completes; `distrun` is a program of its PATH."""

    def __init__(self, name: str, distrun: Distrun) -> None:
        self.name = name
        self.distrun = distrun
        home = distrun.home
        (home / "bin").mkdir()
        program = home / "bin" / "distrun"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m distrun "$@"\n')
        program.chmod(0o755)
        places = {"HOME": str(home), "ZDOTDIR": str(home), "PATH": f"{home / 'bin'}:{distrun.env['PATH']}"}
        self.env = {**distrun.env, **places, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
        if name != "fish":
            (home / ".bashrc").write_text(RC[name])
            (home / ".zshrc").write_text(RC[name])
            argv = ["bash", "--noprofile", "--rcfile", str(home / ".bashrc"), "-i"]
            self.session = Session(argv if name == "bash" else ["zsh", "-i"], self.env, distrun.work, size=(250, 50))
            self.session.expect("READY> ")

    def offered(self, line: str, key: str = EVERY) -> list[str]:
        """Return the words that may stand in the place of the last one of `line`, as the shell would read them."""
        if self.name == "fish":
            script = "distrun completion fish | source; complete --escape -C $argv[1]"
            argv = ["fish", "--no-config", "-c", script, line]
            done = subprocess.run(argv, env=self.env, cwd=self.distrun.work, capture_output=True, check=True)
            assert not done.stderr
            return [shlex.split(each.partition("\t")[0])[0] for each in done.stdout.decode().splitlines()]
        shown = self.session.shown.count("]]\r\n")
        self.session.type(line + key + SHOW)
        self.session.expect("]]\r\n", shown + 1)
        buffer = self.session.shown.rpartition("[[")[2].partition("]]\r\n")[0]
        return shlex.split(buffer)[len(shlex.split(line.rpartition(" ")[0])) :]

    def completed(self, line: str) -> str:
        """Return what the last word becomes, as it can become one word only."""
        (word,) = self.offered(line, TAB)
        return word


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, distrun: Distrun) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    made = Shell(request.param, distrun)
    yield made
    if request.param != "fish":
        made.session.process.kill()
        made.session.process.wait()
        made.session.close()


def test_commands_options_choices_launchers_and_templates_complete(shell: Shell) -> None:
    assert shell.completed("distrun lau") == "launch"
    assert shell.completed("distrun launch --tra") == "--transport"
    assert shell.completed("distrun launch --transport=op") == "--transport=openssh"
    assert set(shell.offered("distrun launch -n 2 --transport ")) == {"fabric", "openssh"}
    assert shell.completed("distrun exec --launcher kub") == "kubernetes"
    assert shell.completed("distrun template render cloud-i") == "cloud-init"


def test_jobs_complete_by_id_and_name_and_kill_offers_those_that_are_not_over(shell: Shell) -> None:
    make_job(shell.distrun, "calm-otter-7f3")
    make_job(shell.distrun, "digits-001", "digits", is_over=True)
    make_job(shell.distrun, "a-b-002", "a:b@c")
    assert set(shell.offered("distrun kill ")) == {"calm-otter-7f3", "a-b-002", "a:b@c"}
    assert set(shell.offered("distrun gc ")) == {"digits-001", "digits"}
    assert set(shell.offered("distrun logs digits ")) == {"worker", "worker-0", "worker-1"}
    assert shell.completed("distrun attach --task worker-1") == "worker-1"
    assert shell.completed("distrun wait a:") == "a:b@c"


def test_hosts_complete_from_the_hosts_file_and_the_ssh_configuration(shell: Shell) -> None:
    (shell.distrun.work / "hosts").write_text("h1\nroot@node[01-02]:22 slots=2\n")
    (shell.distrun.home / ".ssh").mkdir()
    (shell.distrun.home / ".ssh" / "config").write_text("Include more\nHost=near far\nHost n* !nobody\n")
    (shell.distrun.home / ".ssh" / "more").write_text('Host "next"\n')
    words = set(shell.offered("distrun launch -H hosts --hosts h1,n"))
    assert words == {"h1,node01", "h1,node02", "h1,near", "h1,next"}
    assert shell.completed("distrun launch -H hosts --scheduler-host node01") == "node01"


def test_files_complete_where_files_are_wanted_and_behind_the_command(shell: Shell) -> None:
    (shell.distrun.work / "train it.py").touch()
    assert shell.completed("distrun launch -H tr") == "train it.py"
    assert shell.completed("distrun launch --file=tr") == "--file=train it.py"
    assert shell.completed("distrun launch -n 2 cat tr") == "train it.py"
    assert shell.completed("distrun launch -n 2 basena") == "basename"


def test_nothing_in_a_name_is_run_or_taken_for_an_option(shell: Shell) -> None:
    for at, name in enumerate(EVIL):
        make_job(shell.distrun, f"{name}-{at}", name)
    make_job(shell.distrun, "--all-1", "--all")
    make_job(shell.distrun, "two\nlines-1", "esc\x1b[2J")
    (shell.distrun.home / ".ssh").mkdir()
    (shell.distrun.home / ".ssh" / "config").write_text("Host a$(touch${IFS}pwned)b\n")
    expected = {*EVIL, *(f"{name}-{at}" for at, name in enumerate(EVIL))}
    assert set(shell.offered("distrun kill ")) == expected
    assert set(shell.offered("distrun launch --hosts a")) == {"a$(touch${IFS}pwned)b"}
    assert set(shell.offered("distrun logs '$(touch pwned)-0' worker-")) == {"worker-0", "worker-1"}
    assert not (shell.distrun.work / "pwned").exists()


@pytest.mark.parametrize("shell", ["zsh", "fish"], indirect=True)
def test_options_are_shown_with_their_help(shell: Shell) -> None:
    if shell.name == "zsh":
        shell.session.type("distrun launch --sync-" + TAB)
        shell.session.expect("Copy what git would add, and nothing else.")
    else:
        argv = ["fish", "--no-config", "-c", "distrun completion fish | source; complete -C 'distrun launch --sync-g'"]
        done = subprocess.run(argv, env=shell.env, capture_output=True, check=True)
        assert done.stdout == b"--sync-gitignore\tCopy what git would add, and nothing else.\n"


def test_a_command_begins_behind_options_and_their_values() -> None:
    for line in (
        "launch -n4 -vq x.py ",
        "launch --env-file x -- x.py ",
        "exec --timeout 3 x.py ",
        "rerun j -n=4 x.py a",
    ):
        found = answer(line.split(" "))
        assert (found.what, line.split(" ")[found.number - 1]) == ("command", "x.py"), line


def test_an_option_is_not_offered_again_unless_it_is_repeatable() -> None:
    offered = {value for value, _ in answer(["launch", "-n", "2", "--env", "A=1", "-"]).values}
    assert offered & {"-n", "--num-workers", "--env", "--detach"} == {"--env", "--detach"}


def test_what_bash_gives_is_read_as_bash_reads_it() -> None:
    assert split("distrun kill a\\ b") == (["distrun", "kill", "a b"], "", 0)
    assert split("distrun kill 'x y' \"a:'b") == (["distrun", "kill", "x y", "a:'b"], '"', 0)
    assert split("distrun launch --env=K=v") == (["distrun", "launch", "--env=K=v"], "", 8)
    assert split("distrun launch --hosts=a,'b") == (["distrun", "launch", "--hosts=a,b"], "'", 10)


COUNTING = """
import os, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from distrun.__main__ import main
try:
    main()
finally:
    names = {name.partition(".")[0] for name in sys.modules}
    own = [name for name in sys.modules if name.startswith("distrun")]
    jobs = [path for path in opened if "/jobs/" in path]
    print(*sorted(names & {"click", "socket", "subprocess", "dataclasses", "pathlib", "rich"}), file=sys.stderr)
    print(len(sys.modules), len(own), len(jobs), file=sys.stderr)
"""


def test_a_thousand_jobs_are_answered_with_few_modules_and_files(distrun: Distrun) -> None:
    jobs = distrun.home / "state" / "distrun" / "jobs"
    jobs.mkdir(parents=True)
    for number in range(1000):
        folder = jobs / f"job{number}-7f3"
        folder.mkdir()
        if number % 2:
            (folder / "request.json").write_text(json.dumps({"name": f"job{number}"}))
        else:
            (folder / "outcome.json").touch()
    argv = [sys.executable, "-c", COUNTING, "_complete", "fish", "kill", ""]
    done = subprocess.run(argv, env=distrun.env, capture_output=True, text=True, check=True)
    assert done.stdout.count("\tnot over\n") == 500
    assert done.stdout.count("\tthe newest is ") == NAMED
    heavy, counts = done.stderr.splitlines()
    modules, own, files = map(int, counts.split())
    assert not heavy
    assert (modules <= 90, own <= 12, files) == (True, True, NAMED), counts


def test_launchers_of_other_distributions_complete(distrun: Distrun) -> None:
    (distrun.home / "mine-1.dist-info").mkdir()
    (distrun.home / "mine-1.dist-info" / "entry_points.txt").write_text("[distrun.backends]\nmine = mine:Mine\n")
    argv = [*distrun.argv("_complete", "fish", "launch", "--launcher=m")]
    done = subprocess.run(argv, env={**distrun.env, "PYTHONPATH": str(distrun.home)}, capture_output=True, check=True)
    assert done.stdout == b"values 11\nmpi\nmine\n"


def test_what_cannot_be_read_is_left_out(distrun: Distrun) -> None:
    os.mkfifo(distrun.work / "fifo")
    (distrun.work / "wrong").write_text("h1 slots=x\n")
    (make_job(distrun, "torn-1") / "state.json").write_text("[")
    words = [("launch", "-H", "fifo", "--hosts", ""), ("launch", "-H", "wrong", "--hosts", ""), ("logs", "torn-1", "")]
    env = {**distrun.env, "HOME": str(distrun.home)}
    for line in [*words, ("no-such-command", "")]:
        done = subprocess.run(
            distrun.argv("_complete", "fish", *line), env=env, cwd=distrun.work, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout.count(b"\n"), done.stderr) == (0, 1, b""), line


def test_on_a_terminal_completion_says_where_its_script_goes(distrun: Distrun) -> None:
    session = Session(distrun.argv("completion", "bash"), distrun.env, distrun.work, size=(250, 50))
    assert session.ends() == 0
    assert 'in ~/.bashrc: eval "$(distrun completion bash)"' in session.shown
    piped = distrun.answer("completion", "bash")
    assert (piped.returncode, piped.stderr) == (0, b"")
