"""One home for all hosts and the launcher, as a file server gives it: every command, and hosts as launchers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hostlab import Options, Unavailable
from lab import ROOT, Done, Running, Site, shared_folders, skip, wait_until

pytestmark = pytest.mark.lab
LIMIT_S = 60.0
WAITS = "echo begins $RANK; until [ -e ~/go ]; do sleep 0.05; done; echo ends $RANK"


class SharedHome(Site):
    """A lab whose hosts and launcher have one home; the job store and the cache are in it."""

    def env(self, more: Any = None) -> dict[str, str]:
        """The launcher's variables; none names a folder of the launcher's own."""
        found = super().env(more)
        return {name: value for name, value in found.items() if not name.startswith("XDG_") or name in (more or {})}

    def begin(self, folder: Path) -> None:
        """Start a test, in a working folder below the home."""
        super().begin(folder)
        self.work = self.home / "work"
        self.outer_home = self.file(self.home)
        self.jobs = self.outer_home / ".local/state/distrun/jobs"
        self.file(self.work).mkdir()

    def end(self) -> None:
        """End a test; jobs and files of it go."""
        super().end()
        shutil.rmtree(self.outer_home / ".local", ignore_errors=True)
        for path in self.outer_home.iterdir():
            if path.is_dir() and not path.name.startswith("."):
                shutil.rmtree(path)
            elif path.name == "go":
                path.unlink()

    def on(self, host: str, *words: str) -> Done:
        """Run `distrun WORDS` on a host, as a user who has logged in there."""
        script = 'cd ~; exec env HOME="$PWD" "$@"'
        command = ("sh", "-c", script.replace("~", str(self.home)), "sh", sys.executable, "-m", "distrun", *words)
        return self.run("ssh", host, "--", quoted(command))

    def launched(self, *words: str, **more: Any) -> str:
        """Launch a detached job on two hosts; return its id."""
        done = self.distrun("launch", "--detach", *two(self), *words, **more)
        assert done.code == 0, done.err
        return done.out.strip()

    def go(self) -> None:
        """Let tasks that run WAITS go on."""
        (self.outer_home / "go").touch()


def quoted(words: tuple[str, ...]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)


def job_of(launch: Running) -> str:
    """Return the id of the job of a `distrun launch`."""
    found = re.search(r"distrun: job (\S+) ", launch.err)
    assert found is not None, launch.err
    return found[1]


def two(lab: Site) -> list[str]:
    return ["-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--grace", "1"]


@pytest.fixture(scope="module")
def lab_of_module() -> Iterator[SharedHome]:
    try:
        site = SharedHome.up(3, Options(shared_home=True), share=[ROOT, *shared_folders()])
    except Unavailable as why:
        skip(why)
    yield site
    site.down()


@pytest.fixture
def home(lab_of_module: SharedHome, tmp_path: Path) -> Iterator[SharedHome]:
    lab_of_module.begin(tmp_path)
    yield lab_of_module
    lab_of_module.end()


def test_a_detached_job_runs_to_its_end_and_is_seen_from_every_host(home: SharedHome) -> None:
    job = home.launched("bash", "-c", WAITS)
    where = json.loads((home.jobs / job / "control.json").read_text())
    assert where["host"] == "h1"
    for status in (home.distrun("status", job), home.on("h1", "status", job), home.on("h3", "status", job)):
        assert "running" in status.out, status.err
    attached = home.start("attach", "--since-start", job)
    wait_until(lambda: attached.out.count("begins") == 2, LIMIT_S, "both have printed")
    followed = home.start("logs", "-f", "--merge", job)
    screen = home.in_terminal("top", job)
    screen.expect("worker-1")
    screen.expect("2 running")
    screen.type("l")
    screen.expect("begins")
    screen.type("q")
    home.go()
    assert attached.wait() == 0
    assert followed.wait() == 0
    assert followed.out.count("begins") == followed.out.count("ends") == 2
    assert attached.out.count("ends") == 2
    assert home.distrun("wait", job).code == 0
    assert home.on("h3", "wait", job).code == 0
    assert home.distrun("logs", "--merge", job).out.count("ends") == 2
    assert not list((home.jobs / job).rglob("*.tmp"))


def test_a_detached_job_is_killed_from_another_host(home: SharedHome) -> None:
    job = home.launched("sleep", "600")
    killed = home.on("h3", "kill", job)
    assert killed.code == 0, killed.err
    assert "asked its coordinator on h1 to stop the job" in killed.out
    assert home.distrun("wait", job).code == 143
    assert not home.marked()


def test_a_run_dir_that_only_the_launcher_has_does_not_stop_a_detached_job(home: SharedHome, tmp_path: Path) -> None:
    job = home.launched("--run-dir", str(tmp_path / "runs"), "bash", "-c", WAITS)
    home.go()
    assert home.distrun("wait", job).code == 0
    assert "succeeded" in home.distrun("status", job).out
    assert home.distrun("logs", "--merge", job).out.count("ends") == 2
    assert (tmp_path / "runs" / job / "outcome.json").exists()


def test_a_run_dir_below_the_home_is_one_folder_for_a_detached_job(home: SharedHome) -> None:
    job = home.launched("--run-dir", "runs", "bash", "-c", WAITS)
    assert "running" in home.on("h3", "status", job).out
    home.go()
    assert home.on("h3", "wait", job).code == 0
    assert (home.outer_home / "work/runs" / job / "outcome.json").exists()


def test_two_launchers_at_once_and_a_killed_one_do_not_disturb_each_other(home: SharedHome) -> None:
    words = [*two(home), "bash", "-c", WAITS]
    dies, lives = home.start("launch", *words), home.start("launch", *words)
    detached = home.distrun("launch", "--detach", *words)
    assert detached.code == 0, detached.err
    wait_until(lambda: dies.out.count("begins") + lives.out.count("begins") == 4, LIMIT_S, "all tasks run")
    os.kill(dies.coordinator(), signal.SIGKILL)
    assert dies.wait() != 0
    lost = job_of(dies)
    wait_until(lambda: not home.marked(lost), LIMIT_S, "its agents have ended the tasks")
    assert "lost" in home.distrun("status", lost).out
    killed = home.distrun("kill", lost)
    assert killed.code == 0, killed.err
    assert "killed" in home.on("h1", "status", lost).out
    home.go()
    assert lives.wait() == 0, lives.err
    assert home.distrun("wait", detached.out.strip()).code == 0


def test_gc_on_one_host_leaves_what_runs_on_another(home: SharedHome) -> None:
    runs = home.launched("bash", "-c", WAITS)
    assert home.distrun("launch", "--detach", *two(home), "true").code == 0
    (over,) = {path.name for path in home.jobs.iterdir()} - {runs}
    assert home.distrun("wait", over).code == 0
    for do in (partial(home.on, "h3"), home.distrun):
        done = do("gc", "--older-than", "0s")
        assert done.code == 0, done.err
        assert f"job {runs} is running" in do("gc", runs).err
    assert [path.name for path in home.jobs.iterdir()] == [runs]
    home.go()
    assert home.distrun("wait", runs).code == 0
    gone = home.distrun("gc", runs)
    assert gone.code == 0, gone.err
    assert "also its folder" not in gone.out
    assert list(home.jobs.iterdir()) == []


def test_a_folder_below_the_home_is_copied_to_once_for_all_hosts(home: SharedHome) -> None:
    (home.file(home.work) / "hello").write_text("hello\n")
    words = ["-H", home.hosts_file(), "-n", "3", "-s", "0", "--sync-dst-dir", "~/job"]
    done = home.distrun("launch", *words, "cat", "hello")
    assert done.code == 0, done.err
    assert done.out.count("| hello\n") == 3
    assert "sync 3/3 (1 file, 6 B)" in done.err
    assert sorted(path.name for path in (home.outer_home / "job").iterdir()) == [".distrun-sync", "hello"]
    (home.file(home.work) / "hello").write_text("hello again\n")
    again = home.distrun("sync", "-H", home.hosts_file(), "--json", "--sync-dst-dir", "~/job")
    rows = json.loads(again.out)["hosts"]
    assert sorted(row["files"] for row in rows) == [0, 0, 1]
    assert len({row["shared"] or row["host"] for row in rows}) == 1


def test_a_detached_job_that_a_host_of_its_own_launches_has_one_folder(home: SharedHome) -> None:
    launched = home.on("h1", "launch", "--detach", "--hosts", "h1,h2", "-n", "2", "-s", "0", "bash", "-c", WAITS)
    assert launched.code == 0, launched.err
    job = launched.out.strip()
    assert "running" in home.on("h1", "status", job).out
    home.go()
    assert home.on("h1", "wait", job).code == 0
    assert home.distrun("logs", "--merge", job).out.count("ends") == 2


def test_a_folder_that_hosts_share_is_fetched_once(home: SharedHome) -> None:
    done = home.distrun("launch", *two(home), "--fetch", "out", "--fetch-to", "there", "mkdir -p out; touch out/$RANK")
    assert done.code == 0, done.err
    assert "2 files" in done.err
    assert "the same folder as on" in done.err
    there = home.file(home.work) / "there"
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*")) == ["out", "out/0", "out/1"]
