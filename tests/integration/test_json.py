"""What programs read: every command's JSON fits its schema in docs/schemas, with no member that is not in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import folderqueue
import pytest
import schemas
from distrun_cli import Distrun, leaving_nothing, wait_until
from lab import Site
from slowness import scaled

from distrun import cli

LIMIT_S = 60.0
FAILS = "echo one $RANK; echo two >&2; [ $RANK = 0 ] || exit 3; sleep 600"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def distrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Distrun]:
    """The command, with one job that has failed."""
    with leaving_nothing(tmp_path_factory.mktemp("json")) as made:
        done = made.launch("-q", "-n", "2", "-s", "0", "--grace", "1", "--name", "bad", "--json", "bash", "-c", FAILS)
        assert done.returncode == 3, done.stderr
        (made.home / "launched").write_bytes(done.stdout.splitlines()[-1])
        yield made


class Asked:
    """Runs commands in this process, on the store of `distrun`."""

    def __init__(self, capfd: pytest.CaptureFixture[bytes]) -> None:
        self._capfd = capfd

    def lines(self, *words: str, code: int | None = 0) -> list[dict[str, Any]]:
        """Return the objects that a command printed, one a line."""
        return [json.loads(line) for line in self._run(words, code).splitlines()]

    def told(self, schema: str, *words: str, code: int | None = 0) -> dict[str, Any]:
        """Return the one object that a command printed, which fits a schema."""
        value: dict[str, Any] = json.loads(self._run(words, code))
        assert value["schema"] == f"distrun.{schema}/1"
        schemas.check(value, schema)
        return value

    def text(self, *words: str, code: int | None = 0) -> str:
        return self._run(words, code).decode()

    def _run(self, words: Sequence[str], code: int | None) -> bytes:
        self._capfd.readouterr()
        found = cli.run(words)
        out, err = self._capfd.readouterr()
        assert code in (None, found), err
        return out


@pytest.fixture
def asked(distrun: Distrun, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Asked:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, distrun.env[name])
    monkeypatch.chdir(distrun.work)
    return Asked(capfdbinary)


@pytest.mark.parametrize("name", schemas.names())
def test_schemas_are_valid_and_say_what_they_are_for(name: str) -> None:
    import jsonschema

    schema = schemas.read(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == f"distrun.{name}/1" or name == "common"


@pytest.mark.parametrize("name", schemas.names())
def test_readers_may_meet_members_that_they_do_not_know(name: str) -> None:
    """Only `kill`'s pairs have a fixed form."""
    assert "unevaluatedProperties" not in json.dumps(schemas.read(name))
    assert '"additionalProperties": false' not in json.dumps(schemas.read(name))


def test_a_member_that_a_schema_does_not_name_fails_these_tests() -> None:
    value: dict[str, Any] = {"schema": "distrun.hosts/1", "source": "", "hosts": [], "order": [], "folded": ""}
    schemas.check({**value, "warnings": []}, "hosts")
    with pytest.raises(AssertionError, match="extra"):
        schemas.check({**value, "warnings": [], "extra": 1}, "hosts")


def test_every_schema_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "json.md").read_text("utf-8")
    for name in schemas.names():
        assert f"(schemas/{name}.json)" in page


def test_every_command_with_json_has_a_schema() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "distrun").rglob("*.py"))
    found = set(re.findall(r'SCHEMA = "distrun\.([a-z-]+)/1"', source))
    assert found - set(schemas.names()) == set()


def test_launch_and_wait_tell_the_outcome(distrun: Distrun, asked: Asked) -> None:
    outcome = json.loads((distrun.home / "launched").read_bytes())
    schemas.check(outcome, "outcome")
    assert outcome["culprit"]["task"] == "worker-1"
    assert asked.told("wait", "wait", "bad", "--json", code=3)["outcome"] == outcome


def test_status_tells_the_list_and_a_job(asked: Asked) -> None:
    (row,) = [each for each in asked.told("status", "status", "--json")["jobs"] if each["name"] == "bad"]
    assert (row["state"], row["coordinator"]["here"], row["progress"]) == ("failed", True, None)
    one = asked.told("status", "status", "bad", "--json", code=1)
    assert one["job"]["exit_code"] == 3
    assert one["error"]["task"] == "worker-1"
    assert sorted(one["error"]["lines"]) == ["one 1", "two"]
    assert {"exited", "finished"} <= {each["event"] for each in one["events"]}


def test_a_job_that_is_over_is_watched_by_a_snapshot_and_its_end(asked: Asked) -> None:
    lines = asked.lines("status", "bad", "--watch", "--json", code=1)
    for line in lines:
        schemas.check(line, "watch")
    assert [line["type"] for line in lines] == ["snapshot", "end"]
    assert lines[-1]["outcome"]["exit_code"] == 3


def test_logs_are_objects_line_by_line(asked: Asked) -> None:
    lines = asked.lines("logs", "bad", "--json")
    for line in lines:
        schemas.check(line, "log")
    assert {(line["task"], line["stream"], line["text"]) for line in lines} >= {("worker-1", "err", "two")}


def test_what_can_be_removed_or_ended_is_told(asked: Asked) -> None:
    asked.told("gc", "gc", "--dry-run", "--json", "bad")
    asked.told("kill", "kill", "--dry-run", "--json", "bad")
    asked.told("kill", "kill", "--json", "bad")
    asked.told("kill", "kill", "--match", "no such thing", "--any-process", "--dry-run", "--json")


def test_plans_copies_and_hosts_files_are_told(asked: Asked) -> None:
    words = ("--dry-run", "--json", "-n", "2", "python", "x.py")
    plan = asked.told("dry-run", "launch", "--launcher", "local", *words)
    assert [task["name"] for task in plan["tasks"]][:2] == ["scheduler", "server-0"]
    asked.told("hosts", "hosts", "--hosts", "ann@a*4,gpu[1-2]", "--json")
    asked.told("sync", "sync", "--hosts", "a", "--sync-dst-dir", "~/x", "--dry-run", "--json")


def test_what_would_be_submitted_to_an_engine_is_told(distrun: Distrun, tmp_path: Path) -> None:
    env = folderqueue.install(tmp_path)
    done = distrun.run("launch", "--launcher", "folderqueue", "--dry-run", "--json", "-n", "2", "true", env=env)
    value = json.loads(done.stdout)
    schemas.check(value, "dry-run")
    assert value["tasks"][-1]["count"] == 2


def test_the_doctor_tells_all_that_it_found(asked: Asked) -> None:
    assert asked.told("doctor", "doctor", "--json", code=None)["rows"]


def test_a_running_job_is_watched_to_its_end(distrun: Distrun, asked: Asked) -> None:
    words = ("-q", "-n", "1", "-s", "0", "--name", "good", "bash", "-c", "until [ -e go ]; do sleep 0.02; done")
    launch = distrun.begin(*words)
    wait_until(lambda: any(path.name.startswith("good") for path in distrun.jobs), LIMIT_S, "the job is there")
    out = distrun.home / "watched"
    with out.open("wb") as file:
        watch = distrun.start("status", "good", "-w", "--json", stdout=file)
    wait_until(lambda: b'"event": "started"' in out.read_bytes() or b'"pid": ' in out.read_bytes(), LIMIT_S, "it runs")
    assert asked.told("wait", "wait", "good", "--timeout", "0.01", "--json", code=124)["timed_out"] is True
    (distrun.work / "go").touch()
    assert launch.wait(scaled(LIMIT_S)) == 0
    assert watch.wait(scaled(LIMIT_S)) == 0
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    for line in lines:
        schemas.check(line, "watch")
    assert (lines[0]["type"], lines[-1]["type"]) == ("snapshot", "end")
    assert {line["type"] for line in lines[1:-1]} == {"update"}
    states = [line["state"]["state"] for line in lines if line.get("state")]
    assert (states[-1], lines[-1]["outcome"]["exit_code"]) == ("succeeded", 0)


TRAINS = """
import sys, time
import numpy as np
from distrun_runtime import kvstore
kv = kvstore.create("dist_sync")
kv.init(3, np.zeros(1000))
for step in range(100000):
    kv.push(3, np.ones(1000))
    kv.pull(3, out=np.empty(1000))
    kv.report(step=step, total=100000, loss=float("nan"), accuracy=0.5)
    if step % 20 == 0:
        print("step", step, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_what_is_measured_of_a_running_job_is_told(distrun: Distrun, asked: Asked) -> None:
    words = ("--detach", "-q", "-n", "2", "-s", "1", "--grace", "1", "--name", "trains", sys.executable, "-c", TRAINS)
    job = distrun.launch(*words).stdout.decode().strip()
    out = distrun.home / "measured"
    with out.open("wb") as file:
        watch = distrun.start("status", job, "-w", "--json", stdout=file)
    try:
        wait_until(lambda: any(map(is_ripe, out.read_bytes().split(b"\n")[:-1])), LIMIT_S, "all is measured")
        _check_measured(job, asked)
    finally:
        asked.text("kill", job)
    assert watch.wait(scaled(LIMIT_S)) == 1
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    for line in lines:
        schemas.check(line, "watch")
    assert lines[-1]["outcome"]["message"] == "stopped by distrun kill"


def is_ripe(line: bytes) -> bool:
    """Whether a line tells metrics in which nothing is missing."""
    metrics = json.loads(line).get("metrics") or {}
    server = ((metrics.get("store") or {}).get("servers") or {}).get("server-0") or {}
    return bool(server.get("keys") and (metrics.get("progress") or {}).get("rate"))


def _check_measured(job: str, asked: Asked) -> None:
    metrics = asked.told("status", "status", job, "--json")["metrics"]
    assert metrics["progress"]["total"] == 100000
    assert metrics["progress"]["loss"] == "nan"
    assert set(metrics["tasks"]) == {"scheduler", "server-0", "worker-0", "worker-1"}
    assert metrics["store"]["servers"]["server-0"]["keys"] == 1
    (row,) = [each for each in asked.told("status", "status", "--json")["jobs"] if each["id"] == job]
    assert row["progress"]["fraction"] is not None
    table = asked.text("status")
    assert re.search(r"^%s +running +\d+(\.\d)? %%" % job, table, re.MULTILINE), table
    detail = asked.text("status", job)
    assert "loss nan" in detail
    assert re.search(r"^server-0 +1 ", detail, re.MULTILINE), detail
    asked.told("stack", "stack", job, "worker-0", "--json", code=None)


def test_a_reader_that_has_gone_ends_the_watch_without_a_word(distrun: Distrun) -> None:
    read, write = os.pipe()
    watch = distrun.start("status", "--watch", "--json", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    first = b""
    while not first.endswith(b"\n"):
        first += os.read(read, 65536)
    os.close(read)
    schemas.check(json.loads(first), "watch")
    assert watch.wait(scaled(LIMIT_S)) == 0
    assert watch.stderr is not None
    with watch.stderr as stderr:
        assert stderr.read() == b""


def test_answers_of_real_hosts_fit_their_schemas(lab: Site, tmp_path: Path) -> None:
    words = ("-n", "2", "-s", "0", "--grace", "1", "--name", "far", "sleep", "600")
    done = lab.distrun("launch", "--detach", "-H", lab.hosts_file("h1", "h2"), *words, cwd=Path("/tmp"))
    assert done.code == 0, done.err
    job = done.out.strip()

    here = tmp_path / "here"
    here.mkdir()
    (here / "a").write_text("x")

    def told(schema: str, *words: str, code: int = 0) -> dict[str, Any]:
        found = lab.distrun(words[0], "--json", *words[1:], cwd=here)
        assert found.code == code, found.err
        value: dict[str, Any] = json.loads(found.out)
        schemas.check(value, schema)
        return value

    (row,) = told("status", "status")["jobs"]
    assert (row["state"], row["coordinator"]) == ("running", {"host": "h1", "here": False})
    assert told("status", "status", job)["job"]["state"] == "running"
    found = told("status", "status", "--hosts", "h1,nosuch", code=3)
    assert [[each["job"] for each in host["jobs"]] for host in found["hosts"]] == [[job], []]
    told("kill", "kill", "--hosts", "h1,h2", "--dry-run")
    assert told("exec", "exec", "--hosts", "h1,nosuch", "hostname", code=3)["hosts"][0]["stdout"] == "h1\n"
    assert told("sync", "sync", "--hosts", "h1", "--sync-dst-dir", "/tmp/x")["hosts"][0]["files"] == 1
    lab["h1"].down()
    (row,) = told("status", "status")["jobs"]
    assert row["state"] == "unknown"
    assert row["problem"].startswith("h1 cannot be asked: ")
    assert row["seen"] is not None
    lab["h1"].up()
    assert told("kill", "kill", job)["jobs"][0]["job"] == job
    assert told("status", "status", job, code=1)["job"]["state"] == "killed"
