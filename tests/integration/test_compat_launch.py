"""What launch.py's users know works with `distrun launch` in its place: run on the lab's hosts, as tutorials show it.

ROWS says which test proves which promise; the command lines alone are in tests/distrun/cli/test_compat_cli.py. BUGS are
launch.py's own, each a test that ours has none of it.
"""

from __future__ import annotations

import ast
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostlab.layout import address, address6
from lab import ROOT, Done, Site

HERE = "test_compat_launch.py"
CLI = "../distrun/cli/test_compat_cli.py"
FAILURES = "test_lab_failures.py"
LOCAL = "test_launch_local.py"
LAUNCH_ENDS = "test_a_signal_that_ends_launch_ends_its_job_and_other_clients_get_the_jobs_code"

ROWS = {
    "P1 launch.py -n 2 --launcher ssh -H hosts": (HERE, "test_the_first_command_line_of_the_tutorial_runs"),
    "P2 a list of words": (HERE, "test_words_arrive_at_other_hosts_as_they_were_typed"),
    "P2 one quoted word": (HERE, "test_a_quoted_command_is_run_by_the_shell_of_each_host"),
    "P3 as many servers as workers; -s 0": (HERE, "test_five_hosts_and_three_workers_are_placed_as_launch_py_does"),
    "P4 placement": (HERE, "test_five_hosts_and_three_workers_are_placed_as_launch_py_does"),
    "P5 launchers; hosts are needed by ssh": (CLI, "test_a_command_line_of_launch_py_means_what_it_meant"),
    "P6 local instead of ssh": (LOCAL, "test_the_local_launcher_takes_hosts_and_sync_with_a_note"),
    "P7 --sync-dst-dir": (HERE, "test_a_quoted_command_is_run_by_the_shell_of_each_host"),
    "P8 the same directory everywhere": (HERE, "test_the_first_command_line_of_the_tutorial_runs"),
    "P8 it is missing": (FAILURES, "test_a_folder_that_hosts_do_not_have_is_told_with_the_option_that_brings_it"),
    "P9 names of the ssh configuration": (HERE, "test_names_of_the_ssh_configuration_are_no_addresses"),
    "P10 merged output": (HERE, "test_the_first_command_line_of_the_tutorial_runs"),
    "P11 jobs that survive": ("test_hosts_kill.py", "test_an_orphaned_job_is_shown_and_ended"),
    "P12 DMLC_INTERFACE": (HERE, "test_the_interface_that_is_exported_gives_every_task_its_address"),
    "P13 PS_VERBOSE, PS_RESEND": (HERE, "test_what_is_exported_for_debugging_reaches_every_role_on_every_host"),
    "P14 by hand": (HERE, "test_a_job_may_be_started_by_hand_over_two_hosts"),
    "P15 dmlc_local.py": (LOCAL, "test_two_workers_add_through_two_servers"),
    "P16 a worker crashes": (FAILURES, "test_a_worker_that_is_killed_is_the_culprit_though_others_fail_of_its_loss"),
    "P17 the stack's variables": ("../distrun/cli/test_cli.py", "test_hosts_named_by_the_environment_mean_ssh"),
    "P18 libraries beside the script": (HERE, "test_what_lies_elsewhere_is_copied_along"),
}
BUGS = {
    "1 the exit code is always 0": (
        FAILURES,
        "test_a_worker_that_is_killed_is_the_culprit_though_others_fail_of_its_loss",
    ),
    "2 a quote in an argument": (HERE, "test_words_arrive_at_other_hosts_as_they_were_typed"),
    "3 a space in a value": ("test_environment.py", "test_tuning_variables_go_along_and_secrets_and_places_do_not"),
    "4 a comment in the hosts file": (HERE, "test_comments_and_ipv6_addresses_stand_in_the_hosts_file"),
    "5 a comment behind a host": (HERE, "test_comments_and_ipv6_addresses_stand_in_the_hosts_file"),
    "6 IPv6": (HERE, "test_comments_and_ipv6_addresses_stand_in_the_hosts_file"),
    "7 options of the program": (HERE, "test_words_arrive_at_other_hosts_as_they_were_typed"),
    "8 -s 0 with a plain program": (HERE, "test_a_plain_program_without_servers_ends_well"),
    "9 a hosts file and local": (LOCAL, "test_the_local_launcher_takes_hosts_and_sync_with_a_note"),
    "10 rsync fails on one host": ("test_sync.py", "test_a_failed_host_is_exit_code_4_and_the_others_have_it"),
    "11 two launches at once": (FAILURES, "test_two_jobs_with_servers_on_the_same_hosts_both_end_well"),
    "12 no such directory": (FAILURES, "test_a_folder_that_hosts_do_not_have_is_told_with_the_option_that_brings_it"),
    "13 SIGINT": ("test_lab_clients.py", LAUNCH_ENDS),
    "14 SIGTERM": ("test_lab_clients.py", LAUNCH_ENDS),
    "15 SIGKILL": ("test_lab_clients.py", LAUNCH_ENDS),
    "16 secrets on command lines": (FAILURES, "test_a_secret_is_on_no_command_line_and_in_no_file_of_any_host"),
    "17 an alias": (HERE, "test_names_of_the_ssh_configuration_are_no_addresses"),
    "18 variables of one role": (LOCAL, "test_every_task_knows_what_it_is"),
    "19 a server crashes": ("test_nothing_stays.py", "test_a_bundled_server_or_scheduler_that_dies_fails_the_job"),
    "20 out of memory": (FAILURES, "test_a_worker_that_the_kernel_kills_for_its_memory_is_named_with_that_guess"),
}

TRAIN = """\
import argparse, os
import numpy as np
from distrun_runtime import kvstore

parser = argparse.ArgumentParser()
for name in ("network", "dataset", "model", "epochs"):
    parser.add_argument("--" + name)
parser.add_argument("--kv-store", "--kvstore", default="dist_sync", dest="kv")
told = parser.parse_args()
kv = kvstore.create(told.kv)
kv.init("w", np.zeros(4))
kv.push("w", np.full(4, kv.rank + 1.0))
out = np.zeros(4)
kv.pull("w", out=out)
print("sum %g of %d in %s %s" % (out[0], kv.num_workers, os.getcwd(), told.network or told.model), flush=True)
"""
MNIST = "python train_mnist.py --network lenet --kv-store dist_sync"
SERVERS_STAY = (
    "up=/tmp/$DISTRUN_JOB_ID-; [ $DMLC_ROLE = worker ] || { touch $up$DMLC_ROLE; exec sleep 60; }; "
    "until [ -e ${up}server ]; do sleep 0.1; done; "
    "[ $DMLC_RANK = 1 ] || until [ -e ${up}scheduler ]; do sleep 0.1; done"
)
"""What follows `echo` in a job that is its own servers: workers end when those on their host have said theirs."""
CIFAR = "python image_classification.py --dataset cifar10 --model vgg11 --epochs 1 --kvstore dist_sync"


def test_every_row_names_a_test_that_is_there() -> None:
    folder = Path(__file__).parent
    assert [row.split()[0] for row in BUGS] == [str(number) for number in range(1, 21)]
    assert {row.split()[0] for row in ROWS} == {"P%d" % number for number in range(1, 19)}
    for file, name in {*ROWS.values(), *BUGS.values()}:
        body = ast.parse((folder / file).read_text()).body
        assert name in [each.name for each in body if isinstance(each, ast.FunctionDef)], "%s: %s" % (file, name)


@pytest.fixture
def python(lab: Site) -> Iterator[Site]:
    """The lab, where `python` on every host has numpy and pyzmq, as the tutorials take for granted."""
    place = "usr/local/bin/python"
    for host in lab.hosts.values():
        (host.root / place).write_text('#!/bin/sh\nexec %s "$@"\n' % shlex.quote(sys.executable))
        (host.root / place).chmod(0o755)
    yield lab
    for host in lab.hosts.values():
        (host.root / place).unlink(missing_ok=True)


def typed(lab: Site, line: str, **more: Any) -> Done:
    """Run what follows launch.py on a line, typed into a shell that has changed to the folder with the script."""
    return lab.run("bash", "-c", "exec %s -m distrun launch %s" % (shlex.quote(sys.executable), line), **more)


def said(done: Done) -> dict[str, str]:
    """What each task printed, by task@host; the job ended well."""
    assert done.code == 0, done.out + done.err
    return dict(line.split(" | ", 1) for line in done.out.splitlines())


def placed(lab: Site) -> dict[str, str]:
    """Where the tasks of the last job ran: task -> host."""
    folders = (lab.home_folder / "state" / "distrun" / "jobs").iterdir()
    newest = max(folders, key=lambda path: path.stat().st_mtime_ns)
    tasks = json.loads((newest / "outcome.json").read_text())["tasks"]
    return {task["name"]: task["host"] for task in tasks}


def everywhere(lab: Site) -> None:
    """Bring the launcher's folder to all hosts under its own name, as a shared file system would."""
    done = lab.distrun("sync", "-H", lab.hosts_file(), "--sync-dst-dir", str(lab.work))
    assert done.code == 0, done.err


# The command lines.


def test_the_first_command_line_of_the_tutorial_runs(python: Site) -> None:
    lab = python
    (lab.work / "train_mnist.py").write_text(TRAIN)
    everywhere(lab)
    (lab.work / "hosts").write_text("%s\n%s\n" % (address("h1"), address("h2")))
    found = said(typed(lab, "-n 2 --launcher ssh -H hosts " + MNIST))
    text = "sum 3 of 2 in %s lenet" % lab.work
    assert found == {"worker-0@" + address("h1"): text, "worker-1@" + address("h2"): text}
    plain = typed(lab, "-n 2 --no-prefix -H hosts " + MNIST)
    assert plain.out.splitlines() == [text, text], plain.err


def test_five_hosts_and_three_workers_are_placed_as_launch_py_does(python: Site) -> None:
    lab = python
    (lab.work / "image_classification.py").write_text(TRAIN)
    (lab.work / "hosts").write_text("h1\nh2\nh3\nh4\nh1-eth1\n")
    found = said(typed(lab, "-n 3 -H hosts --launcher ssh --sync-dst-dir /tmp/mxnet_job/ " + CIFAR))
    assert set(found.values()) == {"sum 6 of 3 in /tmp/mxnet_job vgg11"}
    assert placed(lab) == {
        "scheduler": "h1",
        **{"server-0": "h1", "server-1": "h2", "server-2": "h3"},
        **{"worker-0": "h4", "worker-1": "h1-eth1", "worker-2": "h1"},
    }
    (lab.work / "hosts").write_text("h1\nh2\nh3\n")
    assert len(said(typed(lab, "-n 3 -H hosts --sync-dst-dir /tmp/mxnet_job/ " + CIFAR))) == 3
    assert sorted(placed(lab).items())[1:] == [
        *(("server-%d" % rank, "h%d" % (rank + 1)) for rank in range(3)),
        *(("worker-%d" % rank, "h%d" % (rank + 1)) for rank in range(3)),
    ]


def test_a_quoted_command_is_run_by_the_shell_of_each_host(python: Site) -> None:
    lab = python
    (lab.work / "cifar10_dist.py").write_text(TRAIN)
    (lab.work / "data").mkdir()
    (lab.work / "data" / "labels").write_text("cat dog")
    (lab.work / "hosts").write_text("h1\nh2\n")
    line = (
        "-n 2 -s 2 -H hosts \\\n    --sync-dst-dir /home/cifar10_dist \\\n    --launcher ssh \\\n    "
        '"python /home/cifar10_dist/cifar10_dist.py && cat data/labels && echo \\" \\$DMLC_ROLE\\""'
    )
    done = typed(lab, line)
    assert done.code == 0, done.err
    for host, rank in (("h1", 0), ("h2", 1)):
        mine = [part.partition(" | ")[2] for part in done.out.splitlines() if part.startswith("worker-%d@" % rank)]
        assert mine == ["sum 3 of 2 in /home/cifar10_dist None", "cat dog worker"]
        assert "rsync %s/ -> %s:/home/cifar10_dist\n" % (lab.work, host) in done.err
        assert (lab[host].root / "home/cifar10_dist/data/labels").read_text() == "cat dog"


# Words, hosts files, variables.


def test_words_arrive_at_other_hosts_as_they_were_typed(lab: Site) -> None:
    words = [
        "it's",
        'a "b"  c',
        "$HOME",
        "`id`",
        "",
        "*",
        "a;b",
        "--queue",
        "q",
        "-n",
        "8",
        "--server=8",
        "line\nend",
        "ä",
    ]
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    told = ("-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "/usr/bin/python3", "-c", show)
    found = said(lab.distrun("launch", *told, *words, cwd=Path("/tmp")))
    assert {task: json.loads(text) for task, text in found.items()} == {"worker-0@h1": words, "worker-1@h2": words}


def test_comments_and_ipv6_addresses_stand_in_the_hosts_file(lab: Site) -> None:
    hosts = lab.hosts_file("# two machines", "", "h1  # the first", "[%s]:22" % address6("h2"))
    done = lab.distrun("launch", "-H", hosts, "-n", "2", "-s", "0", "hostname", cwd=Path("/tmp"))
    assert sorted(said(done).values()) == ["h1", "h2"]


def test_a_plain_program_without_servers_ends_well(lab: Site) -> None:
    done = lab.distrun("launch", "-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "0", "true", cwd=Path("/tmp"))
    assert said(done) == {}


def test_names_of_the_ssh_configuration_are_no_addresses(lab: Site) -> None:
    """The tutorial's configuration, word by word but for host and key: port, user, IdentityFile, IdentitiesOnly."""
    ssh = lab.file(lab.home / ".ssh")
    key = lab.home / "my_key.pem"
    lab.file(key).write_bytes((ssh / "id_ed25519").read_bytes())
    lab.file(key).chmod(0o600)
    text = "Host %s\n    port 22\n    user alice\n    IdentityFile %s\n    IdentitiesOnly yes\n    HostName %s\n\n"
    (ssh / "config").write_text("".join(text % ("d%d" % n, key, address("h%d" % n)) for n in (1, 2)))
    show = "import os, socket; e = os.environ; print(e['USER'], e['DMLC_NODE_HOST'], e['MASTER_ADDR'], end=' ')\n"
    reach = "socket.create_connection((e['MASTER_ADDR'], 22)).close(); print('reached', os.getcwd())\n"
    (lab.work / "train.py").write_text(show + reach)
    (lab.work / "hosts").write_text("d1\nd2\n")
    try:
        done = typed(lab, "-n 2 -s 0 -H hosts --sync-dst-dir /tmp/alices /usr/bin/python3 train.py")
    finally:
        lab.file(key).unlink()
    master = address("h1")
    assert said(done) == {
        "worker-%d@d%d" % (n - 1, n): "alice %s %s reached /tmp/alices" % (address("h%d" % n), master) for n in (1, 2)
    }


def test_the_interface_that_is_exported_gives_every_task_its_address(python: Site) -> None:
    """`export DMLC_INTERFACE=eth1; launch.py ...`, which did nothing over ssh."""
    lab = python
    show = "print(os.environ['DMLC_NODE_HOST'], os.environ['DMLC_PS_ROOT_URI'])\n"
    (lab.work / "train_mnist.py").write_text(TRAIN + show)
    (lab.work / "hosts").write_text("h1\nh2\n")
    done = typed(lab, "-n 2 -H hosts --sync-dst-dir /tmp/mxnet " + MNIST, env={"DMLC_INTERFACE": "eth1"})
    assert done.code == 0, done.err
    shown = [line for line in sorted(done.out.splitlines()) if "sum" not in line]
    root = address("h1", 1)
    assert shown == ["worker-%d@h%d | %s %s" % (n, n + 1, address("h%d" % (n + 1), 1), root) for n in (0, 1)]


def test_what_is_exported_for_debugging_reaches_every_role_on_every_host(lab: Site) -> None:
    env = {"PS_VERBOSE": "2", "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "500"}
    script = "echo $DMLC_ROLE $PS_VERBOSE $PS_RESEND $PS_RESEND_TIMEOUT; " + SERVERS_STAY
    told = ("-H", lab.hosts_file("h1", "h2"), "-n", "2", "-s", "2", "--ps", "command", script)
    found = said(lab.distrun("launch", *told, cwd=Path("/tmp"), env=env))
    roles = {"scheduler@h1": "scheduler"}
    roles.update(("%s-%d@h%d" % (role, n, n + 1), role) for role in ("server", "worker") for n in (0, 1))
    assert found == {task: role + " 2 1 500" for task, role in roles.items()}


def test_what_lies_elsewhere_is_copied_along(lab: Site) -> None:
    """`cp -r ../../python/mxnet .; cp -r ../../lib/libmxnet.so mxnet`, without making a mess of the folder."""
    outside = lab.home_folder / "python" / "mxnet"
    outside.mkdir(parents=True)
    (outside / "__init__.py").write_text("name = 'it'\n")
    (lab.home_folder / "libmxnet.so").write_text("machine code")
    (lab.work / "train.py").write_text("import mxnet, os; print(mxnet.name, open('mxnet/libmxnet.so').read())\n")
    extra = ("--sync-extra", "../python/mxnet", "--sync-extra", "../libmxnet.so:mxnet/libmxnet.so")
    told = ("-H", lab.hosts_file("h1", "h2"), "--sync-dst-dir", "/tmp/extra", *extra, "-n", "2", "-s", "0")
    found = said(lab.distrun("launch", *told, "/usr/bin/python3", "train.py"))
    assert found == {"worker-0@h1": "it machine code", "worker-1@h2": "it machine code"}
    assert sorted(path.name for path in lab.work.iterdir()) == ["train.py"]


# By hand, and when something breaks.


def test_a_job_may_be_started_by_hand_over_two_hosts(python: Site) -> None:
    """The variables of the tutorial and the same command in every role; nothing of distrun but the runtime's folder."""
    lab = python
    (lab.work / "image_classification.py").write_text(TRAIN)
    for host in ("h1", "h2"):
        for source in (str(ROOT / "runtime") + "/", str(lab.work) + "/"):
            done = lab.run("rsync", "-a", "--exclude", "__pycache__", source, "%s:/tmp/by-hand/" % host)
            assert done.code == 0, done.err
    names = {"PS_ROOT_URI": address("h1"), "PS_ROOT_PORT": "9092", "NUM_SERVER": "2", "NUM_WORKER": "2"}
    job = " ".join("DMLC_%s=%s" % item for item in names.items())
    where = [("scheduler", "h1"), ("server", "h1"), ("server", "h2"), ("worker", "h1"), ("worker", "h2")]
    started = [
        lab.spawn("ssh", host, "cd /tmp/by-hand && %s DMLC_ROLE=%s PYTHONPATH=/tmp/by-hand %s" % (job, role, CIFAR))
        for role, host in where
    ]
    assert [each.wait() for each in started] == [0] * 5, "".join(each.err for each in started)
    assert [each.out for each in started] == [""] * 3 + ["sum 3 of 2 in /tmp/by-hand vgg11\n"] * 2
