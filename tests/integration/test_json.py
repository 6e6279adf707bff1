"""What programs read: every command's JSON fits its schema in docs/schemas, with no member that is not in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folderqueue
import pytest
import schemas
from distrun_cli import Distrun, leaving_nothing, wait_until
from lab import Site

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


def told(done: subprocess.CompletedProcess[bytes], schema: str, code: int = 0) -> dict[str, Any]:
    """Return the one object that a command printed, which fits a schema."""
    assert done.returncode == code, done.stderr.decode()
    value: dict[str, Any] = json.loads(done.stdout)
    assert value["schema"] == f"distrun.{schema}/1"
    schemas.check(value, schema)
    return value


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


def test_launch_and_wait_tell_the_outcome(distrun: Distrun) -> None:
    outcome = json.loads((distrun.home / "launched").read_bytes())
    schemas.check(outcome, "outcome")
    assert outcome["culprit"]["task"] == "worker-1"
    waited = told(distrun.run("wait", "bad", "--json"), "wait", 3)
    assert waited["outcome"] == outcome


def test_status_tells_the_list_and_a_job(distrun: Distrun) -> None:
    (row,) = told(distrun.run("status", "--json"), "status")["jobs"]
    assert (row["state"], row["coordinator"]["here"], row["progress"]) == ("failed", True, None)
    one = told(distrun.run("status", "bad", "--json"), "status", 1)
    assert one["job"]["exit_code"] == 3
    assert one["error"]["task"] == "worker-1"
    assert sorted(one["error"]["lines"]) == ["one 1", "two"]
    assert {"exited", "finished"} <= {each["event"] for each in one["events"]}


def test_a_job_that_is_over_is_watched_by_a_snapshot_and_its_end(distrun: Distrun) -> None:
    done = distrun.run("status", "bad", "--watch", "--json")
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        schemas.check(line, "watch")
    assert [line["type"] for line in lines] == ["snapshot", "end"]
    assert lines[-1]["outcome"]["exit_code"] == 3


def test_logs_are_objects_line_by_line(distrun: Distrun) -> None:
    lines = [json.loads(line) for line in distrun.run("logs", "bad", "--json").stdout.splitlines()]
    for line in lines:
        schemas.check(line, "log")
    assert {(line["task"], line["stream"], line["text"]) for line in lines} >= {("worker-1", "err", "two")}


def test_what_can_be_removed_or_ended_is_told(distrun: Distrun) -> None:
    told(distrun.run("gc", "--dry-run", "--json", "bad"), "gc")
    told(distrun.run("kill", "--dry-run", "--json", "bad"), "kill")
    told(distrun.run("kill", "--json", "bad"), "kill")
    told(distrun.run("kill", "--stale", "--dry-run", "--json"), "kill")
    told(distrun.run("kill", "--match", "no such thing", "--any-process", "--dry-run", "--json"), "kill")


def test_plans_copies_and_hosts_files_are_told(distrun: Distrun) -> None:
    plan = told(distrun.launch("--dry-run", "--json", "-n", "2", "python", "x.py"), "dry-run")
    assert [task["name"] for task in plan["tasks"]][:2] == ["scheduler", "server-0"]
    told(distrun.run("hosts", "--hosts", "ann@a*4,gpu[1-2]", "--json"), "hosts")
    told(distrun.run("sync", "--hosts", "a", "--sync-dst-dir", "~/x", "--dry-run", "--json"), "sync")


def test_what_would_be_submitted_to_an_engine_is_told(distrun: Distrun, tmp_path: Path) -> None:
    env = folderqueue.install(tmp_path)
    done = distrun.run("launch", "--launcher", "folderqueue", "--dry-run", "--json", "-n", "2", "true", env=env)
    assert told(done, "dry-run")["tasks"][-1]["count"] == 2


def test_the_doctor_tells_all_that_it_found(distrun: Distrun) -> None:
    assert told(distrun.run("doctor", "--json"), "doctor")["rows"]


def test_a_running_job_is_watched_to_its_end(distrun: Distrun) -> None:
    words = ("-q", "-n", "1", "-s", "0", "--name", "good", "bash", "-c", "until [ -e go ]; do sleep 0.02; done")
    launch = distrun.begin(*words)
    wait_until(lambda: any(path.name.startswith("good") for path in distrun.jobs), LIMIT_S, "the job is there")
    out = distrun.home / "watched"
    with out.open("wb") as file:
        watch = distrun.start("status", "good", "-w", "--json", stdout=file)
    wait_until(lambda: b'"event": "started"' in out.read_bytes() or b'"pid": ' in out.read_bytes(), LIMIT_S, "it runs")
    late = distrun.run("wait", "good", "--timeout", "0.01", "--json")
    assert told(late, "wait", 124)["timed_out"] is True
    (distrun.work / "go").touch()
    assert launch.wait(LIMIT_S) == 0
    assert watch.wait(LIMIT_S) == 0
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    for line in lines:
        schemas.check(line, "watch")
    assert (lines[0]["type"], lines[-1]["type"]) == ("snapshot", "end")
    assert {line["type"] for line in lines[1:-1]} == {"update"}
    states = [line["state"]["state"] for line in lines if line.get("state")]
    assert (states[-1], lines[-1]["outcome"]["exit_code"]) == ("succeeded", 0)


def test_a_reader_that_has_gone_ends_the_watch_without_a_word(distrun: Distrun) -> None:
    read, write = os.pipe()
    watch = distrun.start("status", "--watch", "--json", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    first = b""
    while not first.endswith(b"\n"):
        first += os.read(read, 65536)
    os.close(read)
    schemas.check(json.loads(first), "watch")
    assert watch.wait(LIMIT_S) == 0
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

    def asked(schema: str, *words: str, code: int = 0) -> dict[str, Any]:
        found = lab.distrun(words[0], "--json", *words[1:], cwd=here)
        assert found.code == code, found.err
        value: dict[str, Any] = json.loads(found.out)
        schemas.check(value, schema)
        return value

    (row,) = asked("status", "status")["jobs"]
    assert (row["state"], row["coordinator"]) == ("running", {"host": "h1", "here": False})
    assert asked("status", "status", job)["job"]["state"] == "running"
    found = asked("status", "status", "--hosts", "h1,nosuch", code=3)
    assert [[each["job"] for each in host["jobs"]] for host in found["hosts"]] == [[job], []]
    asked("kill", "kill", "--hosts", "h1,h2", "--dry-run")
    assert asked("exec", "exec", "--hosts", "h1,nosuch", "hostname", code=3)["hosts"][0]["stdout"] == "h1\n"
    assert asked("sync", "sync", "--hosts", "h1", "--sync-dst-dir", "/tmp/x")["hosts"][0]["files"] == 1
    asked("doctor", "doctor", "--hosts", "h1,h2", "--sync-dst-dir", "/tmp/x", "--no-servers")
    lab["h1"].down()
    (row,) = asked("status", "status")["jobs"]
    assert row["state"] == "unknown"
    assert row["problem"].startswith("h1 cannot be asked: ")
    assert row["seen"] is not None
    shown = lab.distrun("status")
    assert re.search(r"^%s +unknown, seen \d+ (s|min) ago" % job, shown.out, re.MULTILINE), shown.out
    lab["h1"].up()
    assert asked("kill", "kill", job)["jobs"][0]["job"] == job
    assert asked("status", "status", job, code=1)["job"]["state"] == "killed"
