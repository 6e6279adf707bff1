"""`distrun top` and `distrun dashboard` of a job whose coordinator is on one of its hosts, over ssh."""

from __future__ import annotations

import signal

from lab import Site, wait_until
from labjob import EVERYWHERE, LIMIT_S, nothing_stays

SCRIPT = """\
for i in $(seq 2000); do
    echo step $i of $RANK
    [ -e /tmp/fail-$RANK ] && { echo disk of $RANK is full >&2; exit 5; }
    sleep 0.1
done"""


def asked(lab: Site, url: str, token: str) -> str:
    """Return what a browser of the launcher gets."""
    return lab.run("curl", "-sS", "-H", f"Authorization: Bearer {token}", url).out


def test_a_job_whose_coordinator_is_elsewhere_is_shown_with_logs_and_its_first_error(lab: Site) -> None:
    words = ("launch", "--detach", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "--grace", "1", "-q")
    done = lab.distrun(*words, SCRIPT, cwd=EVERYWHERE)
    assert done.code == 0, done.err
    job = done.out.strip()
    screen = lab.in_terminal("top", job)
    screen.expect("worker-1")
    screen.expect("2 running")
    screen.expect("CPU")  # numbers come over ssh, too
    screen.type("\x1b[Bl")
    screen.expect(" of 1", 20)
    assert "of 0" not in screen.shown
    screen.type("q")
    screen.expect("2 running", 2)
    page = lab.start("dashboard", job)
    url, _, token = wait_until(lambda: page.out, LIMIT_S, "a URL").strip().partition("#token=")
    token = token.partition("&")[0]
    wait_until(lambda: '["2 running", ' in asked(lab, f"{url}api/job?id={job}", token), LIMIT_S, "the job's page")
    wait_until(lambda: '"CPU cores"' in asked(lab, f"{url}api/job?id={job}", token), LIMIT_S, "a plot")
    assert "running" in asked(lab, f"{url}api/jobs", token)
    lab["h2"].exec("touch", "/tmp/fail-1")
    screen.expect("first error: worker-1 on h2, exit code 5")
    screen.expect("disk of 1 is full")
    screen.expect("exit code 5:")
    wait_until(lambda: "disk of 1 is full" in asked(lab, f"{url}api/job?id={job}", token), LIMIT_S, "the error's page")
    page.signal(signal.SIGINT)
    assert page.wait() == 0
    screen.type("q")
    assert screen.ends() == 1
    assert "worker-1" in screen.shown.partition("\x1b[?1049l")[2]
    wait_until(lambda: lab.distrun("wait", job).code == 5, LIMIT_S, "the job's code")
    lab["h2"].exec("rm", "/tmp/fail-1")
    nothing_stays(lab)
