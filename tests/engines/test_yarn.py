"""Jobs on a real YARN: what the user sees, how they end, and that nothing is left on a node, in YARN or in HDFS."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from backendcontract import BackendContract
from lab import wait_until
from yarnlab import LIMIT_S, YarnSite, kill, site, site_of_module

__all__ = ["site", "site_of_module"]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]
"""slow: begun before the others, since it takes longest."""

WAITS = "echo up; sleep 300 & wait"


class TestContract(BackendContract):
    @pytest.fixture
    def site(self, site: YarnSite) -> YarnSite:
        return site


def test_digits_train_on_two_workers_and_two_servers_without_a_shared_folder(site: YarnSite) -> None:
    words = ("-n", "2", "-s", "2", "--worker-memory", "700M", "--sync-dst-dir", "/tmp/digits")
    program = (sys.executable, "digits.py", "--kv-store", "dist_sync", "--epochs", "2")
    done = site.launch(*words, *program, cwd=site.copy("digits.py"))
    assert done.code == 0, done.err
    assert done.out.count("Test_acc") == 4


def test_a_job_waits_in_a_full_queue_and_is_found_there_when_its_record_is_lost(site: YarnSite) -> None:
    first = site.begin_launch("-n", "2", "-s", "0", "--queue", "small", "--detach", WAITS)
    assert first.wait(LIMIT_S) == 0, first.err
    job = first.out.strip()
    wait_until(lambda: site.logged(job).count("up") == 2, LIMIT_S, "both workers are up")
    assert "worker-1@h" in site.distrun("logs", job).out

    # The secret is gone from HDFS, and was never in the spec.
    [app] = site.applications()
    _, spec = site.cluster.call("GET", "/app/v1/services/%s?user.name=root" % app["name"])
    assert [row["dest_file"] for row in spec["components"][0]["configuration"]["files"]] == ["distrun-secret"]
    assert site.files("/user/root/.distrun") == []

    second = site.begin_launch("-n", "2", "-s", "0", "--queue", "small", WAITS)
    site.heard(second, "queued, ACCEPTED: Application is Activated, waiting for resources to be assigned for AM")
    site.heard(second, "queue small is 83 % full")
    assert "queued" in site.distrun("status").out
    [(folder, mode)] = site.files("/user/root/.distrun")
    assert mode == "700"
    assert [mode for _, mode in site.files("/user/root/.distrun/" + folder)] == ["600"]
    path = "/user/root/.distrun/%s/distrun-secret" % folder
    assert site.cluster.hdfs("GET", path, "op=OPEN", user="alice")[0] == 403

    # Its coordinator dies and its record is lost: YARN still knows it, and the other one is let alone.
    kill(second.coordinator())
    assert second.wait(LIMIT_S) == 8, second.err
    shutil.rmtree(site.folder(site.job(second)))
    stale = site.distrun("kill", "--launcher", "yarn", "--stale", "-y")
    assert stale.code == 0, stale.out + stale.err
    assert [each["name"] for each in site.applications()] == [app["name"]]
    assert site.files("/user/root/.distrun") == []

    attached = site.start("attach", job)
    killed = site.distrun("kill", job)
    assert killed.code == 0, killed.err
    assert attached.wait(LIMIT_S) == 143, attached.err
    assert site.distrun("wait", job).code == 143


def test_a_job_whose_coordinator_is_killed_ends_and_kill_removes_it(site: YarnSite) -> None:
    running = site.begin_launch("-n", "2", "-s", "0", "--grace", "1", WAITS)
    site.printed(running, "| up", 2)
    job = site.job(running)
    kill(running.coordinator())
    assert running.wait(LIMIT_S) == 8, running.err
    assert site.distrun("kill", job).code == 0
    assert site.cluster.applications() == []


def test_a_killed_client_is_noticed_by_the_coordinator_which_ends_the_job(site: YarnSite) -> None:
    running = site.begin_launch("-n", "1", "-s", "0", "--grace", "1", WAITS)
    site.printed(running, "| up")
    running.kill()  # the terminal's process alone; the coordinator lives
    wait_until(lambda: '"state": "killed"' in site.distrun("status", "--json").out, LIMIT_S, "its end is recorded")
    site.nothing_stays()


def test_a_node_that_is_powered_off_ends_the_job_with_seven(site: YarnSite) -> None:
    running = site.begin_launch("-n", "3", "-s", "0", "--suspect-after", "3", "--lost-after", "8", WAITS)
    site.printed(running, "| up", 3)
    [app] = site.cluster.applications()
    master = app["amHostHttpAddress"].partition(":")[0]
    tasks = {line.partition("@")[2].partition(" ")[0] for line in running.out.splitlines() if line.endswith("| up")}
    victim = next(iter(sorted(tasks - {master})), master)
    site[victim].poweroff()
    assert running.wait(LIMIT_S) == 7, running.err
    assert victim in running.err


def test_too_much_memory_is_137_and_says_what_to_do(site: YarnSite) -> None:
    program = "import time; x = b'x' * (500 << 20); time.sleep(100)"
    done = site.launch("-n", "1", "-s", "0", "python3", "-c", program)
    assert done.code == 137, done.err
    assert "out of memory" in done.err
    assert "--worker-memory" in done.err


def test_the_time_limit_is_124(site: YarnSite) -> None:
    done = site.launch("-n", "1", "-s", "0", "--time", "15", WAITS)
    assert done.code == 124, done.err
    assert "--time" in done.err


def test_a_job_that_is_killed_from_outside_is_143(site: YarnSite) -> None:
    running = site.begin_launch("-n", "1", "-s", "0", WAITS)
    site.printed(running, "| up")
    [app] = site.cluster.applications()
    site.cluster.call("PUT", "/ws/v1/cluster/apps/%s/state?user.name=root" % app["id"], {"state": "KILLED"})
    assert running.wait(LIMIT_S) == 143, running.err
    assert "killed from outside" in running.err


def test_the_distributed_shell_runs_a_job_too(site: YarnSite, tmp_path: Path) -> None:
    config = tmp_path / "config" / "distrun"
    config.mkdir(parents=True)
    (config / "config.ini").write_text("[yarn]\nshell = yes\nyarn = %s/yarn\n" % site.cluster.conf)
    env = {"XDG_CONFIG_HOME": str(config.parent)}
    done = site.launch("-n", "2", "-s", "0", 'echo "$RANK of $WORLD_SIZE"', env=env)
    assert done.code == 0, done.err
    assert sorted(line.partition(" | ")[2] for line in done.out.splitlines()) == ["0 of 2", "1 of 2"]
    assert {name for name, _ in site.files("/user/root")} <= {".distrun", ".yarn"}


def test_what_yarn_cannot_give_is_refused_before_anything_is_submitted(site: YarnSite) -> None:
    big = site.launch("-n", "1", "-s", "0", "--worker-memory", "99G", "true")
    assert (big.code, "the largest of YARN's 3 nodes has 2048 MiB" in big.err) == (2, True), big.err
    gpus = site.launch("-n", "1", "-s", "0", "--worker-gpus", "1", "true")
    assert (gpus.code, "--worker-gpus: 1" in gpus.err) == (2, True), gpus.err
    queue = site.launch("-n", "1", "-s", "0", "--queue", "nope", "true")
    assert (queue.code, "it has: default, small" in queue.err) == (2, True), queue.err


def test_a_dry_run_prints_the_spec_and_submits_nothing(site: YarnSite) -> None:
    done = site.launch("-n", "2", "-s", "1", "--dry-run", "python3", "train.py")
    assert done.code == 0, done.err
    assert '"restart_policy": "NEVER"' in done.out
    assert "POST" in done.out
    assert "train.py" not in done.out[done.out.index("{") : done.out.index("executed:")]


def test_the_doctor_says_what_is_there(site: YarnSite) -> None:
    done = site.distrun("doctor", "--launcher", "yarn")
    assert done.code == 0, done.out + done.err
    assert "3 nodes are up" in done.out
