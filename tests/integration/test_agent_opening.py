"""What a real agent does between `begin` and `ready`: activation, interpreters, the runtime, refusals."""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import signal
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agentkit import HOST, WAIT_S, AgentDriver, agent, poll, shell, task
from slowness import scaled

from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import session
from distrun_runtime.contract.plan import Host, Runtime, Sync, Task
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import AskAgent

both_ways = pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="linux", marks=pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")),
        pytest.param({"DISTRUN_PORTABLE": "1"}, id="portable", marks=pytest.mark.portable),
    ],
)
SHOW = 'printf "%s|" "$A" "$PYTHONPATH" "$SSH_CONNECTION" "$SSH_AUTH_SOCK" "$GLOO_SOCKET_IFNAME"; echo'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without login files: these would be run too, and killed half way."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def change(driver: AgentDriver, **members: Any) -> AgentDriver:
    driver.plan = driver.plan._replace(**members)
    return driver


def run(driver: AgentDriver, name: str = "worker-0", **env: str) -> str:
    """Spawn a task and return what it wrote."""
    driver.spawn(name, **env)
    assert driver.exited(name)["code"] == 0
    return driver.text(name).decode()


def refused(driver: AgentDriver) -> dict[str, object]:
    frame = driver.begin()
    assert frame.type == "refused", frame
    driver.wait("bye")
    assert driver.child.wait(scaled(WAIT_S)) == 6
    assert driver.leftovers() == []
    return frame.header


# Activation


def test_the_tasks_environment_is_what_the_activation_left_whatever_it_printed() -> None:
    script = "echo noise; echo more >&2; export A='two\nlines' B={fd}\nunset C # and a comment"
    env = {"C": "1", "PYTHONPATH": "/own"}
    with agent(shell('printf "%s|" "$A" "$B" "${C-unset}" "$PYTHONPATH"'), env=env) as driver:
        assert change(driver, activate=script).begin().type == "ready"
        assert run(driver) == "two\nlines|{fd}|unset|/own|"


def test_the_activation_runs_once_for_all_tasks_of_a_host(tmp_path: Path) -> None:
    tasks = [shell("echo $A", "worker-%d" % rank) for rank in range(3)]
    with agent(*tasks) as driver:
        change(driver, activate="echo x >> %s/runs; export A=5" % tmp_path).begin()
        assert [run(driver, each.name) for each in tasks] == ["5\n"] * 3
    assert (tmp_path / "runs").read_text() == "x\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo sorry >&2; false", "activation on here failed (exit code 1)\nsorry"),
        ("echo bye; exit 7", "activation on here failed (exit code 7)\nbye"),
        ("if", "syntax error"),
        ("exit 0", "ended without telling its variables"),
        ("kill -9 $$", "failed (signal 9)"),
        (". /no/such/venv/bin/activate", "No such file"),
    ],
)
def test_an_activation_that_fails_is_refused_with_its_last_words(script: str, words: str) -> None:
    with agent(shell("true")) as driver:
        header = refused(change(driver, activate=script))
        assert header["kind"] == "activation"
        assert words in str(header["reason"])
        assert "bash -l" in str(header["fix"])


@both_ways
def test_an_activation_sees_no_arguments_and_a_job_that_ends_meanwhile_ends_it(way: Mapping[str, str]) -> None:
    with agent(shell("true"), env=way) as driver:
        change(driver, activate="[ $# = 0 ] || exit 1; sleep 600 & sleep 601")
        driver.say("begin", **begin_of(driver))
        poll(lambda: len(driver.leftovers()) >= 3, "the activation runs, with its mark")
        begin = time.monotonic()
        assert driver.finish() == 0
        assert time.monotonic() - begin < 30  # it would take 600 s
        poll(lambda: not driver.leftovers(), "nothing of it is left")


@both_ways
def test_an_agent_killed_during_its_activation_leaves_nothing(way: Mapping[str, str]) -> None:
    with agent(shell("true"), env=way) as driver:
        change(driver, activate="setsid sleep 602 & sleep 603")
        driver.say("begin", **begin_of(driver))
        poll(lambda: len(driver.leftovers()) >= 3, "the activation runs")
        os.kill(driver.agent_pid(), signal.SIGKILL)
        poll(lambda: not driver.leftovers(), "the guard has ended it")


def test_pings_are_answered_while_the_activation_goes_on() -> None:
    with agent(shell("true")) as driver:
        change(driver, activate="sleep 600")
        driver.say("begin", **begin_of(driver))
        driver.say("ping", n=5)
        assert driver.wait("pong").header["n"] == 5
        driver.say("spawn", task="worker-0", env={})
        assert "has not begun" in str(driver.wait("warning").header["text"])
        assert driver.finish() == 0


def test_what_an_activation_leaves_in_the_background_is_not_waited_for_and_ends_with_the_job() -> None:
    with agent(shell("echo $A")) as driver:
        assert change(driver, activate="sleep 604 & export A=1").begin().type == "ready"
        assert run(driver) == "1\n"
        assert driver.finish() == 0
        assert driver.leftovers() == []


def begin_of(driver: AgentDriver) -> dict[str, object]:
    plan = plans.to_json(driver.plan)
    return {"version": session.VERSION, "plan": plan, "token": "", "secret_env": {}, "host": HOST}


def test_the_login_files_of_the_user_count(home: Path) -> None:
    (home / ".bash_profile").write_text("echo welcome; export A=login$#\n")
    with agent(shell("echo $A")) as driver:
        assert change(driver, activate="true").begin().type == "ready"
        assert run(driver) == "login0\n", "they see no arguments"


def test_the_text_of_the_activation_is_in_no_process_list_and_in_no_file_that_stays(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    text = "\n".join(["ps -axww -o args= > %s/all" % tmp_path, "[ $# = 0 ] || exit 9", "export A=s3cr3t-word"])
    with agent(shell("sleep 605 & echo $A"), env={"TMPDIR": str(tmp)}) as driver:
        assert change(driver, activate=text).begin().type == "ready"
        assert "bash -l" in (tmp_path / "all").read_text()
        assert "s3cr3t-word" not in (tmp_path / "all").read_text()
        assert list(tmp.iterdir()) == []
        assert run(driver) == "s3cr3t-word\n"


def test_an_activation_needs_no_temporary_folder_of_the_users(tmp_path: Path) -> None:
    with agent(shell("true"), env={"TMPDIR": str(tmp_path / "nowhere")}) as driver:
        assert change(driver, activate="true").begin().type == "ready", "another place will do"


# What comes with the files


def synced(driver: AgentDriver, folder: Path, *, brings: bool = True, **members: Any) -> AgentDriver:
    tasks = tuple(each._replace(cwd=str(folder)) for each in driver.plan.tasks)
    sync = Sync("/nowhere", 1, 1, brings=brings, activated=members.pop("activated", ()))
    return change(driver, sync=sync, cwd=str(folder), tasks=tasks, **members)


def settle(driver: AgentDriver) -> session.Frame:
    driver.say("settle")
    return driver.wait("settled", "refused")


def test_what_comes_with_the_files_is_activated_and_looked_at_once_they_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    program = task(["./python", "-c", "import os; print(os.environ['A'])"], needs=["json"])
    with agent(program) as driver:
        ready = synced(driver, folder, activate="source ./env.sh").begin()
        assert (ready.type, ready.header["python"]) == ("ready", {})
        (folder / "env.sh").write_text("export A=$PWD\n")
        (folder / "python").write_text('#!/bin/sh\nexec %s "$@"\n' % shlex.quote(sys.executable))
        (folder / "python").chmod(0o755)
        settled = settle(driver)
        assert set(settled.header["python"]) == {"./python"}
        assert run(driver) == "%s\n" % folder


@pytest.mark.parametrize(
    ("members", "kind"), [({"activate": "source ./env.sh"}, "activation"), ({}, "python"), ({"sub": 1}, "folder")]
)
def test_what_is_missing_among_the_files_is_refused(tmp_path: Path, members: dict[str, Any], kind: str) -> None:
    with agent(task(["./python", "-c", "pass"], needs=["json"])) as driver:
        is_sub = members.pop("sub", 0)
        synced(driver, tmp_path / "job", **members)
        if is_sub:
            change(driver, tasks=(driver.plan.tasks[0]._replace(cwd=str(tmp_path / "job" / "sub")),))
        assert driver.begin().type == "ready"
        frame = settle(driver)
        assert (frame.type, frame.header["kind"]) == ("refused", kind)
        driver.wait("bye")
        assert driver.child.wait(scaled(WAIT_S)) == 6
        assert driver.leftovers() == []


def test_what_cannot_come_with_the_files_is_looked_at_before_they_are_copied(tmp_path: Path) -> None:
    with agent(needing("zmq_x")) as driver:
        assert refused(synced(driver, tmp_path / "job", brings=False))["kind"] == "module"
    with agent(task([sys.executable, "-c", "import os; print(os.environ['A'])"], needs=["json"])) as driver:
        ready = synced(driver, tmp_path / "job", brings=False, activate="echo x >> %s/runs; export A=5" % tmp_path)
        assert set(ready.begin().header["python"]) == {sys.executable}
        assert settle(driver).type == "settled"
        assert run(driver) == "5\n"
    assert (tmp_path / "runs").read_text() == "x\n", "and not once more"


@pytest.mark.parametrize("how", ["interpreter", "relative", "activated", "PATH", "PYTHONPATH"])
def test_what_lies_in_the_folder_of_the_files_is_looked_at_once_they_are_there(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "job"
    argv0 = {"interpreter": str(folder / "python"), "relative": "./python"}.get(how, sys.executable)
    # A list of folders is not empty without this one.
    env = {how: "%s:%s" % (folder / "lib", os.environ.get(how, "/x"))} if how.isupper() else {}
    members = {"activated": ("venv",), "activate": "true"} if how == "activated" else {}
    with agent(needing("zmq_x", argv0=argv0), env=env) as driver:
        assert synced(driver, folder, brings=False, **members).begin().type == "ready"
        assert settle(driver).type == "refused"


def test_an_agent_settles_after_it_got_ready_and_once() -> None:
    with agent(shell("true")) as driver:
        driver.say("settle")
        assert "`settle` was ignored" in str(driver.wait("warning").header["text"])
        assert driver.begin().type == "ready"
        assert settle(driver).type == "settled"
        driver.say("settle")
        assert "`settle` was ignored" in str(driver.wait("warning").header["text"])


# Interpreters


def needing(*needs: str, argv0: str = sys.executable) -> Task:
    return task([argv0, "-c", "pass"], needs=needs)


def test_missing_modules_are_named_with_host_interpreter_and_the_line_to_type() -> None:
    with agent(needing("json", "zmq_x", "numpy_x")) as driver:
        header = refused(driver)
        assert header["kind"] == "module"
        assert "%s on here (Python 3." % sys.executable in str(header["reason"])
        assert "cannot import zmq_x, numpy_x" in str(header["reason"])
        assert "No module named 'zmq_x'" in str(header["reason"])
        without, install, other = str(header["fix"]).splitlines()
        assert without == "add -s 0 if the command does not use the store"
        assert install == "for servers and workers: %s -m pip install zmq_x numpy_x" % shlex.quote(sys.executable)
        assert other.startswith("or name another interpreter")


def test_the_advice_names_the_doctor_and_the_way_to_the_host_that_were_typed() -> None:
    with agent(needing("zmq_x")) as driver:
        change(driver, doctor="distrun doctor -H hosts", hosts=(Host(HOST, login="ssh -p 2222 h1"),))
        lines = str(refused(driver)["fix"]).splitlines()
        assert lines[1] == "for servers: distrun doctor -H hosts --fix"
        script = "%s -m pip install zmq_x" % shlex.quote(sys.executable)
        assert lines[2] == "for servers and workers: ssh -p 2222 h1 %s" % shlex.quote(script)


def test_servers_that_import_the_users_rules_are_not_to_be_left_out() -> None:
    program = needing("zmq_x")._replace(env={"DISTRUN_SERVER_IMPORT": "rules"})
    with agent(program) as driver:
        assert "-s 0" not in str(refused(driver)["fix"])


# The environment that `distrun doctor --fix` makes


MAJOR_MINOR = "%d.%d" % sys.version_info[:2]
PLACE = "python%s-%s" % (MAJOR_MINOR, os.uname().machine)


def environment_for_servers(data: Path, module: str, place: str = PLACE) -> Path:
    """Make one in a user's data folder that has `module`; return its interpreter."""
    python = data / "distrun" / "servers" / place / "bin" / "python"
    python.parent.mkdir(parents=True)
    modules = python.parent / "modules"
    modules.mkdir()
    (modules / (module + ".py")).write_text("__version__ = '7'\n")
    python.write_text("#!/bin/sh\nPYTHONPATH='%s' exec '%s' \"$@\"\n" % (modules, sys.executable))
    python.chmod(0o755)
    for folder in (data / "distrun", data / "distrun" / "servers", python.parent.parent):
        folder.chmod(0o700)
    return python


def test_servers_run_by_the_environment_for_servers_where_their_interpreter_lacks_modules(tmp_path: Path) -> None:
    python = environment_for_servers(tmp_path, "zmq_x")
    code = "import zmq_x; print(zmq_x.__file__)"
    server = task([sys.executable, "-c", code], "server-0", needs=["zmq_x"])
    worker = task([sys.executable, "-c", "import importlib.util as u; print(u.find_spec('zmq_x'))"])
    with agent(server, worker, env={"XDG_DATA_HOME": str(tmp_path)}) as driver:
        ready = driver.begin()
        assert ready.type == "ready"
        version = ".".join(str(part) for part in sys.version_info[:3])
        assert ready.header["python"] == {sys.executable: "%s %s" % (version, python)}
        assert run(driver, "server-0") == "%s\n" % (python.parent / "modules" / "zmq_x.py")
        assert run(driver) == "None\n", "workers keep their own"


def test_it_is_found_in_the_home_and_one_of_another_python_will_do(home: Path) -> None:
    python = environment_for_servers(home / ".local" / "share", "zmq_x", "python3.99-" + os.uname().machine)
    with agent(needing("zmq_x")) as driver:
        ready = driver.begin()
        assert ready.type == "ready"
        assert str(ready.header["python"][sys.executable]).endswith(str(python))


def test_an_interpreter_that_has_the_modules_is_used_and_no_other(tmp_path: Path) -> None:
    environment_for_servers(tmp_path, "json")
    with agent(needing("json"), env={"XDG_DATA_HOME": str(tmp_path)}) as driver:
        assert str(driver.begin().header["python"][sys.executable]).endswith(" " + sys.executable)


@pytest.mark.parametrize("which", ["servers", "servers/" + PLACE])
def test_an_environment_that_others_can_change_is_not_used(tmp_path: Path, which: str) -> None:
    environment_for_servers(tmp_path, "zmq_x")
    (tmp_path / "distrun" / which).chmod(0o777)
    with agent(needing("zmq_x"), env={"XDG_DATA_HOME": str(tmp_path)}) as driver:
        assert refused(driver)["kind"] == "module"


def test_an_environment_that_does_not_work_is_passed_over(tmp_path: Path) -> None:
    environment_for_servers(tmp_path, "zmq_x").write_text("#!/bin/sh\nexit 3\n")
    with agent(needing("zmq_x"), env={"XDG_DATA_HOME": str(tmp_path)}) as driver:
        assert "cannot import zmq_x" in str(refused(driver)["reason"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no program mypython on here (in no folder of the tasks' PATH)"),
        ("#!/bin/sh\necho oh no >&2; exit 3\n", "mypython on here is not a working Python (exit code 3)\noh no"),
        (
            '#!/bin/sh\necho \'{"version": "3.8.1", "path": "/opt/py"}\' > "/dev/fd/$3"\n',  # sh has >&N for N < 10
            "is Python 3.8.1; servers and scheduler",
        ),
    ],
)
def test_an_interpreter_that_will_not_do_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        script = tmp_path / "mypython"
        script.write_text(text)
        script.chmod(0o755)
    env = {"PATH": "%s:%s" % (tmp_path, os.environ["PATH"])}
    with agent(needing("json", argv0="mypython"), env=env) as driver:
        header = refused(driver)
        assert header["kind"] == "python"
        assert words in str(header["reason"])
        assert "--python" in str(header["fix"])


def test_the_interpreter_is_looked_for_where_the_activation_put_it(tmp_path: Path) -> None:
    (tmp_path / "mypython").symlink_to(sys.executable)
    with agent(needing("json", argv0="mypython")) as driver:
        ready = change(driver, activate="PATH=%s:$PATH" % tmp_path).begin()
        assert ready.type == "ready"
        assert set(ready.header["python"]) == {"mypython"}


def test_the_home_of_this_host_may_be_named_in_an_interpreter_and_a_command(home: Path) -> None:
    (home / "bin").mkdir()
    (home / "bin" / "mypython").symlink_to(sys.executable)
    with agent(task(["~/bin/mypython", "-c", "print(5)"], needs=["json"])) as driver:
        ready = driver.begin()
        assert set(ready.header["python"]) == {"~/bin/mypython"}
        assert run(driver) == "5\n"


# The runtime


def archive() -> tuple[str, bytes]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as whole:
        whole.writestr("distrun_runtime/__init__.py", "")
        whole.writestr("distrun_runtime/marvel.py", "print('from the cache')\n")
    return hashlib.sha256(content.getvalue()).hexdigest(), content.getvalue()


def test_the_runtime_is_asked_for_once_and_comes_first_on_the_path(tmp_path: Path) -> None:
    digest, data = archive()
    env = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": "/own"}
    show = [sys.executable, "-m", "distrun_runtime.marvel"]
    for attempt in range(2):
        with agent(task(show), shell("echo $PYTHONPATH", "worker-1"), env=env) as driver:
            change(driver, runtime=Runtime(digest=digest))
            driver.say("begin", **begin_of(driver))
            if attempt == 0:
                assert driver.wait("need").header["digest"] == digest
                driver.send(messages.runtime(digest, data))
            assert driver.wait("ready", "refused", "need").type == "ready"
            assert run(driver) == "from the cache\n"
            folder = str(tmp_path / "distrun" / "runtime" / digest)
            assert run(driver, "worker-1", PYTHONPATH="/sent") == "%s:/sent\n" % folder
            os.utime(folder, (1.0, 1.0))
            driver.say("ping", n=5)
            assert driver.wait("pong").header["n"] == 5
            poll(lambda path=folder: os.stat(path).st_mtime > 1.0, "a job that runs says that it uses the folder")
    assert (tmp_path / "distrun").stat().st_mode & 0o777 == 0o700


def test_a_runtime_that_is_there_already_is_only_put_on_the_path() -> None:
    with agent(shell("echo $PYTHONPATH"), env={"PYTHONPATH": "/own"}) as driver:
        assert change(driver, runtime=Runtime(path="/opt/runtime")).begin().type == "ready"
        assert run(driver) == "/opt/runtime:/own\n"


def test_a_runtime_that_nobody_asked_for_is_ignored() -> None:
    with agent(shell("true")) as driver:
        driver.send(messages.runtime("ab", b"x"))
        assert "was not asked for" in str(driver.wait("warning").header["text"])
        assert driver.begin().type == "ready"


# The rest


def test_variables_of_the_agents_own_login_are_not_passed_on() -> None:
    env = {"SSH_CONNECTION": "10.0.0.1 1 10.9.9.9 22", "SSH_AUTH_SOCK": "/sock", "A": "1", "PYTHONPATH": ""}
    with agent(shell(SHOW), env=env) as driver:
        change(driver, backend="ssh", hosts=(Host(HOST),))
        assert driver.begin().header["address"] == "10.9.9.9", "where the launcher reached it"
        assert run(driver) == "1|||||\n"
    with agent(shell(SHOW), env=env) as driver:
        driver.begin()
        assert run(driver) == "1||10.0.0.1 1 10.9.9.9 22|/sock||\n", "tasks on this machine have what the user has"


@pytest.mark.parametrize("own", ["", "eth7"])
def test_workers_of_several_hosts_are_told_the_interface_unless_the_user_did(own: str) -> None:
    env = {"GLOO_SOCKET_IFNAME": own} if own else {}
    show = 'echo "$GLOO_SOCKET_IFNAME ${NCCL_SOCKET_IFNAME-none}"'
    hosts = (Host(HOST, interface="lo"), Host("d2", "127.0.0.1"))
    with agent(shell(show), shell(show, "server-0"), env=env) as driver:
        change(driver, hosts=hosts).begin()
        assert run(driver) == "%s lo\n" % (own or "lo")
        assert run(driver, "server-0") == "%s none\n" % own
    with agent(shell(show), env=env) as driver:
        change(driver, hosts=(Host(HOST, "127.0.0.1"), hosts[1])).begin()
        assert run(driver) == "%s none\n" % (own or "lo")


def test_questions_are_answered_before_a_job_only() -> None:
    with agent(shell("true")) as driver:
        driver.send(messages.to_frame(AskAgent(HOST, 3, "no such tool", {})))
        answer = driver.wait("answer").header
        assert answer["id"] == 3
        assert "no such tool" in str(answer["error"])
        driver.begin()
        driver.send(messages.to_frame(AskAgent(HOST, 4, "survey", {})))
        assert "before a job" in str(driver.wait("answer").header["error"])
