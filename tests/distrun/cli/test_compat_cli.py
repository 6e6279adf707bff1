"""Every command line of the old launchers that tutorials show works with `distrun launch` in its place."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

import pytest
from distrun_cli import Distrun

HOME = "/ho" + "me/ubuntu"
"""Written so, because no file may name a folder of one machine."""
LAUNCHERS = ("launch.py", "dmlc_local.py", "tools/")
"""How the old programs' paths end. One page lost the file's name."""


@dataclass(frozen=True)
class Line:
    """A command line as it is shown, and what it means."""

    shown: str
    hosts: str = "d1\nd2\n"
    workers: tuple[str, ...] = ("d1", "d2")
    servers: tuple[str, ...] = ("d1", "d2")
    command: tuple[str, ...] = ()
    cwd: str = ""
    """Empty: the launcher's own."""
    backend: str = "ssh"


MNIST = ("python", "train_mnist.py", "--network", "lenet", "--kv-store", "dist_sync")
CIFAR = ("python", "image_classification.py", "--dataset", "cifar10", "--model", "vgg11", "--epochs", "1")
CIFAR += ("--kvstore", "dist_sync")
FIVE = "h1\nh2\nh3\nh4\nh5\n"

LINES = {
    "ssh": Line(
        "python ../../tools/launch.py -n 2 --launcher ssh -H hosts "
        "python train_mnist.py --network lenet --kv-store dist_sync",
        hosts="172.30.0.172\n172.30.0.171\n",
        workers=("172.30.0.172", "172.30.0.171"),
        servers=("172.30.0.172", "172.30.0.171"),
        command=MNIST,
    ),
    "copied to all hosts": Line(
        "python ../../tools/launch.py -n 2 -H hosts --sync-dst-dir /tmp/mxnet \\\n"
        "   python train_mnist.py --network lenet --kv-store dist_sync",
        command=MNIST,
        cwd="/tmp/mxnet",
    ),
    "five hosts and three workers": Line(
        "../../tools/launch.py -n 3 -H hosts --launcher ssh python image_classification.py --dataset cifar10 "
        "--model vgg11 --epochs 1 --kvstore dist_sync",
        hosts=FIVE,
        workers=("h4", "h5", "h1"),
        servers=("h1", "h2", "h3"),
        command=CIFAR,
    ),
    "copied to a folder with a slash": Line(
        "../../tools/launch.py -n 3 -H hosts --launcher ssh --sync-dst-dir /tmp/mxnet_job/ "
        "python image_classification.py --dataset cifar10 --model vgg11 --epochs 1 --kvstore dist_sync",
        hosts="h1\nh2\nh3\n",
        workers=("h1", "h2", "h3"),
        servers=("h1", "h2", "h3"),
        command=CIFAR,
        cwd="/tmp/mxnet_job",
    ),
    "local instead of ssh, hosts file and all": Line(
        "../../tools/launch.py -n 3 -H hosts --launcher local python image_classification.py --dataset cifar10 "
        "--model vgg11 --epochs 1 --kvstore dist_sync",
        hosts=FIVE,
        workers=("HERE",) * 3,
        servers=("HERE",) * 3,
        command=CIFAR,
        backend="local",
    ),
    "a quoted command on several lines": Line(
        "python ~/mxnet/tools/ -n 2 -s 2 -H hosts \\\n    --sync-dst-dir %s/cifar10_dist \\\n"
        '    --launcher ssh \\\n    "python %s/cifar10_dist/"' % (HOME, HOME),
        command=("bash", "-c", "python %s/cifar10_dist/" % HOME),
        cwd=HOME + "/cifar10_dist",
    ),
    "a quoted command": Line(
        "$ python ~/mxnet/tools/ -n 2 -s 2 -H hosts --sync-dst-dir %s/cifar10_dist --launcher ssh "
        '"python %s/cifar10_dist/"' % (HOME, HOME),
        hosts="a1\na2\n",
        workers=("a1", "a2"),
        servers=("a1", "a2"),
        command=("bash", "-c", "python %s/cifar10_dist/" % HOME),
        cwd=HOME + "/cifar10_dist",
    ),
}


def words(shown: str) -> list[str]:
    """Return the arguments of the old launcher."""
    found = shlex.split(shown.replace("\\\n", " "))
    (at,) = (index for index, word in enumerate(found) if word.endswith(LAUNCHERS))
    return found[at + 1 :]


def plan(distrun: Distrun, *arguments: str, **env: str) -> dict[str, Any]:
    result = distrun.run("launch", "--dry-run", "--json", *arguments, env=env)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


def tasks(plan: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [task for task in plan["tasks"] if task["role"] == role]


@pytest.mark.parametrize("name", LINES)
def test_a_command_line_of_launch_py_means_what_it_meant(name: str, distrun: Distrun) -> None:
    line = LINES[name]
    (distrun.work / "hosts").write_text(line.hosts)
    made = plan(distrun, *words(line.shown))
    here = made["hosts"][0]["name"]
    assert made["backend"] == line.backend
    for role, expected in (("worker", line.workers), ("server", line.servers)):
        assert [task["host"] for task in tasks(made, role)] == [here if each == "HERE" else each for each in expected]
    assert len(tasks(made, "scheduler")) == 1
    assert [tuple(task["argv"]) for task in tasks(made, "worker")] == [line.command] * len(line.workers)
    assert made["cwd"].rstrip("/") == (line.cwd or str(distrun.work))
    assert bool(made.get("sync")) == bool(line.cwd)


def test_the_command_line_of_dmlc_local_means_what_it_meant(distrun: Distrun) -> None:
    made = plan(distrun, *words("mxnet/tracker/dmlc_local.py -n 2 -s 2 python train.py"))
    assert made["backend"] == "local"
    assert [len(tasks(made, role)) for role in ("scheduler", "server", "worker")] == [1, 2, 2]
    assert tasks(made, "worker")[0]["argv"] == ["python", "train.py"]
    assert plan(distrun, "--launcher", "local", "-n", "2", "-s", "2", "python", "train.py") == made


def test_the_interface_that_is_exported_before_is_that_of_every_host(distrun: Distrun) -> None:
    """`export DMLC_INTERFACE=eth0; python ../../tools/launch.py ...`"""
    (distrun.work / "hosts").write_text("d1\nd2\n")
    made = plan(distrun, *words(LINES["ssh"].shown), DMLC_INTERFACE="eth0")
    assert made["interface"] == "eth0"


@pytest.mark.parametrize("name", ["PS_VERBOSE", "PS_RESEND", "PS_RESEND_TIMEOUT"])
def test_what_is_exported_for_the_servers_reaches_every_task(name: str, distrun: Distrun) -> None:
    """`export PS_VERBOSE=1; python ../../tools/launch.py ...`"""
    (distrun.work / "hosts").write_text("d1\nd2\n")
    made = plan(distrun, *words(LINES["ssh"].shown), **{name: "1"})
    for task in made["tasks"]:
        assert task["env"][name] == "***"  # forwarded values are not shown


def test_the_help_is_asked_for_as_before(distrun: Distrun) -> None:
    result = distrun.run("launch", *words("python ../../tools/launch.py -h"))
    assert result.returncode == 0
    assert b"--sync-dst-dir" in result.stdout


@pytest.mark.parametrize("name", ["DEEPLEARNING_WORKERS_PATH", "DISTRUN_HOSTFILE"])
def test_the_stacks_variable_names_the_hosts_when_no_option_does(name: str, distrun: Distrun) -> None:
    (distrun.work / "workers").write_text("d7\nd8\n")
    env = {name: "workers", "DEEPLEARNING_WORKERS_COUNT": "2", "DEEPLEARNING_WORKER_GPU_COUNT": "4"}
    made = plan(distrun, "-n", "2", "python", "train.py", **env)
    assert (made["backend"], [host["name"] for host in made["hosts"]]) == ("ssh", ["d7", "d8"])
