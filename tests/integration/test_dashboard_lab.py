"""`distrun top` of a job whose coordinator is on one of its hosts, over ssh."""

from __future__ import annotations

from lab import Site, wait_until
from labjob import EVERYWHERE, LIMIT_S, nothing_stays

SCRIPT = """\
for i in $(seq 2000); do
    echo step $i of $RANK
    [ -e /tmp/fail-$RANK ] && { echo disk of $RANK is full >&2; exit 5; }
    sleep 0.1
done"""


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
    lab["h2"].exec("touch", "/tmp/fail-1")
    screen.expect("first error: worker-1 on h2, exit code 5")
    screen.expect("disk of 1 is full")
    screen.expect("exit code 5:")
    screen.type("q")
    assert screen.ends() == 1
    assert "worker-1" in screen.shown.partition("\x1b[?1049l")[2]
    wait_until(lambda: lab.distrun("wait", job).code == 5, LIMIT_S, "the job's code")
    lab["h2"].exec("rm", "/tmp/fail-1")
    nothing_stays(lab)
