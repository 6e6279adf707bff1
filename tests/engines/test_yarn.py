"""Jobs on a real YARN: what the user sees, how they end, and that nothing is left on a node, in YARN or in HDFS."""

from __future__ import annotations

import json
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
    wait_until(lambda: site.files("/user/root/.distrun") == [], LIMIT_S, "the secret is gone from HDFS")

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


def test_a_killed_coordinator_is_cleaned_up_after_and_a_killed_client_is_noticed(site: YarnSite) -> None:
    headless = site.begin_launch("-n", "2", "-s", "0", "--grace", "1", WAITS)
    closed = site.begin_launch("-n", "1", "-s", "0", "--grace", "1", WAITS)
    site.printed(headless, "| up", 2)
    site.printed(closed, "| up")
    kill(headless.coordinator())
    closed.kill()  # the terminal's process alone; its coordinator lives
    assert headless.wait(LIMIT_S) == 8, headless.err
    assert site.distrun("kill", site.job(headless)).code == 0

    def states() -> list[str]:
        return [job["state"] for job in json.loads(site.distrun("status", "--json").out)["jobs"]]

    wait_until(lambda: states() == ["killed", "killed"], LIMIT_S, "the end of both is recorded")
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


def test_a_node_that_is_powered_off_is_named_where_it_ran_the_application_master(site: YarnSite) -> None:
    running = site.begin_launch("-n", "1", "-s", "0", "--suspect-after", "15", "--lost-after", "30", WAITS)
    site.printed(running, "| up")
    [app] = site.cluster.applications()
    master = app["amHostHttpAddress"].partition(":")[0]
    site[master].poweroff()
    assert running.wait(LIMIT_S) == 7, running.err
    assert f"the node {master} is lost" in running.err


def test_why_yarn_ended_a_job_gives_its_code_memory_time_or_a_kill_from_outside(site: YarnSite) -> None:
    program = "import time; x = b'x' * (500 << 20); time.sleep(100)"
    greedy = site.begin_launch("-n", "1", "-s", "0", "python3", "-c", program)
    late = site.begin_launch("-n", "1", "-s", "0", "--time", "20", WAITS)
    killed = site.begin_launch("-n", "1", "-s", "0", WAITS)
    site.printed(killed, "| up")
    [app] = [app for app in site.applications() if site.job(killed) in app["name"]]
    site.cluster.call("PUT", "/ws/v1/cluster/apps/%s/state?user.name=root" % app["id"], {"state": "KILLED"})
    assert killed.wait(LIMIT_S) == 143, killed.err
    assert "killed from outside" in killed.err
    assert greedy.wait(LIMIT_S) == 137, greedy.err
    assert "out of memory" in greedy.err
    assert "--worker-memory" in greedy.err
    assert late.wait(LIMIT_S) == 124, late.err
    assert "--time" in late.err


def test_the_distributed_shell_runs_a_job_too(site: YarnSite, tmp_path: Path) -> None:
    config = tmp_path / "config" / "distrun"
    config.mkdir(parents=True)
    (config / "config.toml").write_text("[yarn]\nshell = true\nyarn = '%s/yarn'\n" % site.cluster.conf)
    env = {"XDG_CONFIG_HOME": str(config.parent)}
    done = site.launch("-n", "2", "-s", "0", 'echo "$RANK of $WORLD_SIZE"', env=env)
    assert done.code == 0, done.err
    assert sorted(line.partition(" | ")[2] for line in done.out.splitlines()) == ["0 of 2", "1 of 2"]
    assert {name for name, _ in site.files("/user/root")} <= {".distrun", ".yarn"}


def test_the_doctor_says_what_is_there(site: YarnSite) -> None:
    done = site.distrun("doctor", "--launcher", "yarn")
    assert done.code == 0, done.out + done.err
    assert "3 nodes are up" in done.out
