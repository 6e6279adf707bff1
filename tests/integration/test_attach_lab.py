"""Jobs on several hosts that are left and followed from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

from lab import Site, wait_until

LIMIT_S = 60.0
WAITS = "echo up; until [ -e /tmp/go ]; do sleep 0.05; done; echo over"


def test_a_job_on_hosts_is_launched_left_followed_and_waited_for(lab: Site) -> None:
    words = ("-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--grace", "1")
    done = lab.distrun("launch", "--detach", *words, f"bash -c '{WAITS}'", cwd=Path("/tmp"))
    assert done.code == 0, done.err
    job = done.out.strip()
    attached = lab.start("attach", "--since-start", job)
    wait_until(lambda: attached.out.count("up") == 2, LIMIT_S, "both have said it")
    stacks = lab.distrun("stack", job)  # asked where its coordinator is, which asks both agents
    assert (stacks.code, stacks.err.count("is no Python: bash")) == (1, 2), stacks.err
    for name in ("h1", "h2"):
        lab[name].exec("touch", "/tmp/go")
    assert attached.wait() == 0
    assert attached.out.count("over") == 2
    assert lab.distrun("wait", job).code == 0


def test_a_job_on_hosts_is_detached_and_stopped_from_another_terminal(lab: Site) -> None:
    words = ("-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--grace", "1")
    launch = lab.start("launch", *words, "sleep 600", cwd=Path("/tmp"))
    folder = lab.home_folder / "state/distrun/jobs"
    wait_until(lambda: folder.exists() and any(folder.glob("*/control.json")), LIMIT_S)
    job = next(iter(folder.glob("*/control.json"))).parent
    wait_until(lambda: json.loads((job / "state.json").read_text())["state"] == "running", LIMIT_S)
    assert lab.distrun("detach", job.name).code == 0
    assert launch.wait() == 0
    attached = lab.start("attach", job.name)
    done = lab.distrun("kill", job.name)
    assert done.code == 0, done.err
    assert attached.wait() == 143
    assert json.loads((job / "state.json").read_text())["message"] == "stopped by distrun kill"
