"""`distrun exec` over real hosts."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from hostlab import Process
from lab import Site, wait_until

LIMIT_S = 60.0


def sleepers(lab: Site) -> list[Process]:
    return [each for each in lab.strangers() if each.command == b"sleep\x00600\x00"]


def test_different_outputs_and_codes_are_told_apart(lab: Site) -> None:
    script = "hostname; echo oops >&2; exit ${HOSTNAME#h}"
    done = lab.distrun("exec", "--hosts", "h[1-3]", "bash", "-c", script)
    assert done.code == 3
    assert [line for line in done.out.splitlines() if line.startswith("h")] == ["h1", "h1", "h2", "h2", "h3", "h3"]
    assert "h[1-3] (3), stderr\n---------------\noops\n" in done.err
    assert [line for line in done.err.splitlines() if line.startswith("distrun")] == [
        "distrun: h%d: exit code %d" % (n, n) for n in (1, 2, 3)
    ]


def test_words_arrive_exactly_and_nothing_of_our_environment(lab: Site) -> None:
    words = ["a b", "$HOME", "'", '"', "", "*", "\\", "ü"]
    done = lab.distrun(
        "exec", "--hosts", "h1", "--json", "printf", "%s|", *words, env={"DMLC_ROLE": "worker", "OURS": "x"}
    )
    assert json.loads(done.out)["hosts"][0]["stdout"] == "".join(word + "|" for word in words)
    shown = lab.distrun("exec", "--hosts", "h1", "env", env={"MXNET_X": "1", "OURS": "x"})
    assert "OURS" not in shown.out
    assert "MXNET_X" not in shown.out


def test_lines_are_streamed_with_their_host(lab: Site) -> None:
    done = lab.distrun("exec", "--hosts", "h1,h2", "--no-fold", "echo one; echo two >&2; printf three")
    assert sorted(done.out.splitlines()) == ["h1: one", "h1: three", "h2: one", "h2: three"]
    assert sorted(done.err.splitlines()) == ["h1: two", "h2: two"]


def test_hosts_that_cannot_be_reached_are_listed_and_the_others_go_on(lab: Site) -> None:
    lab["h2"].reject(22)
    done = lab.distrun("exec", "--hosts", "h1,h2,nosuch", "hostname")
    assert done.code == 3
    assert "\nh1\n" in done.out
    for host in ("h2", "nosuch"):
        assert "distrun: error: %s: " % host in done.err
    assert done.err.count("distrun: hint: ") == 2
    worse = lab.distrun("exec", "--hosts", "h1,nosuch", "exit 9")
    assert worse.code == 9


def test_a_frozen_host_does_not_hold_the_others(lab: Site) -> None:
    lab["h2"].stop()
    done = lab.distrun("exec", "--hosts", "h1,h2", "--connect-timeout", "8", "hostname")
    assert done.code == 3
    assert "\nh1\n" in done.out
    assert "distrun: error: h2: " in done.err


def test_what_takes_too_long_is_ended_and_leaves_nothing(lab: Site) -> None:
    done = lab.distrun("exec", "--hosts", "h1,h2", "--timeout", "1", "setsid sleep 600 & sleep 600")
    assert done.code == 124
    assert "h[1-2]: it took too long and was ended, code 124" in done.err
    wait_until(lambda: not lab.strangers(), LIMIT_S, "nothing is left")


def test_ctrl_c_ends_it_everywhere(lab: Site) -> None:
    running = lab.start("exec", "--hosts", "h1,h2", "sleep", "600")
    wait_until(lambda: len(sleepers(lab)) == 2, LIMIT_S, "both run")
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    wait_until(lambda: not lab.strangers(), LIMIT_S, "nothing is left")


def test_killing_it_ends_the_command_everywhere(lab: Site) -> None:
    running = lab.start("exec", "--hosts", "h1,h2", "sleep", "600")
    wait_until(lambda: len(sleepers(lab)) == 2, LIMIT_S, "both run")
    os.kill(running.pid, signal.SIGKILL)
    wait_until(lambda: not lab.strangers(), LIMIT_S, "nothing is left")


def test_the_json_form_has_everything(lab: Site) -> None:
    done = lab.distrun("exec", "--hosts", "h1,nosuch", "--json", "--cwd", "/tmp", "pwd; exit 2")
    value: dict[str, Any] = json.loads(done.out)
    assert (value["schema"], value["exit_code"], done.code) == ("distrun.exec/1", 3, 3)
    first, second = value["hosts"]
    assert (first["host"], first["code"], first["stdout"], first["problem"]) == ("h1", 2, "/tmp\n", None)
    assert (second["host"], second["code"], second["problem"]["kind"]) == ("nosuch", None, "dns")
