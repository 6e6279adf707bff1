"""`distrun fetch` and `launch --fetch`: files of real hosts, and of this machine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from distrun_cli import Distrun
from lab import Site, wait_until

from distrun.sync.rules import FETCHED, CopyRules
from distrun.sync.tree import members

LIMIT_S = 60.0


def files(folder: Path) -> dict[str, str]:
    """Return the files below a folder: path -> content."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def launch(lab: Site, script: str, *options: str) -> tuple[int, str, str]:
    """Launch a job in /tmp/job of two hosts; return exit code, what it said, and its id."""
    copies = ("-H", lab.hosts_file("h1", "h2"), "-s", "0", "--sync-dst-dir", "/tmp/job")
    done = lab.distrun("launch", "-n", "2", *copies, *options, script)
    (job,) = (lab.home_folder / "state/distrun/jobs").iterdir()
    return done.code, done.err, job.name


def test_files_of_a_local_job_come_from_its_folder(distrun: Distrun) -> None:
    done = distrun.launch("-n", "2", "-s", "0", "--fetch", "out", "mkdir -p out; echo $RANK > out/$RANK")
    assert done.returncode == 0, done.stderr
    job = distrun.job.name
    assert files(distrun.work / job) == {"out/0": "0\n", "out/1": "1\n", FETCHED: ""}
    assert distrun.run("fetch", job, "--to", "again").returncode == 0
    assert files(distrun.work / "again") == {"out/0": "0\n", "out/1": "1\n"}
    # A later job gets what has been fetched to a folder that was named, and not what is in the one of an earlier job.
    for kept in ((), (f"+ {job}",)):
        tops = {each.name.split(b"/")[0].decode() for each in members(str(distrun.work), CopyRules(kept))}
        assert {"again", job} & tops == ({"again", job} if kept else {"again"})
    for words, code, says in (
        (("launch", "-n", "1", "--fetch", "../x", "true"), 2, b"expected a path below the job's folder"),
        (("fetch", job, "/etc/passwd"), 2, b"distrun fetch JOB --from DIR PATH"),
        (("fetch", job, "nothing"), 4, b"'nothing': there are no such files in %b" % bytes(distrun.work)),
        (("fetch", job, "x", "--from", "/nowhere"), 4, b"No such file or directory: '/nowhere'"),
    ):
        done = distrun.run(*words)
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr


@pytest.mark.lab
def test_a_failed_jobs_files_come_before_the_report_and_later_without_the_host_that_is_down(lab: Site) -> None:
    script = "mkdir -p out/deep; echo $RANK | tee out/rank > out/deep/.rank; [ $RANK = 0 ] || { sleep 1; exit 3; }"
    code, err, job = launch(lab, script, "--fetch", "out/**", "--fetch-to", "there")
    assert code == 3
    assert err.index("h1: 2 files") < err.index("first failure"), err
    expected = {f"h{rank + 1}/out/{name}": f"{rank}\n" for rank in range(2) for name in ("rank", "deep/.rank")}
    assert files(lab.work / "there") == expected
    lab["h1"].poweroff()
    done = lab.distrun("fetch", job, "out/r*")
    assert done.code == 4
    assert "files of 1 of 2 hosts did not come" in done.err
    assert "h1: " in done.err
    assert files(lab.work / job) == {"h2/out/rank": "1\n", FETCHED: ""}
    assert ".on" not in lab["h2"].exec("ls", "-A", "/tmp/job")


@pytest.mark.lab
def test_ctrl_c_leaves_no_part_of_a_file_and_no_process(lab: Site) -> None:
    _, _, job = launch(lab, "head -c 400M /dev/zero > big")
    fetch = lab.start("fetch", job, "big", "--to", "there")
    there = lab.work / "there"
    wait_until(lambda: any(path.stat().st_size for path in there.rglob(".distrun-fetch-*")), LIMIT_S, "a part came")
    fetch.signal(signal.SIGINT)
    assert fetch.wait() == 130
    assert not files(there)
    wait_until(lambda: not lab.strangers(), LIMIT_S, "the agents have ended")
