"""Scripts of the templates for containers and machines on hosts of the lab: a job trains over what they set up."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wheels
import yaml
from hostlab.host import Host
from lab import Done, Site, wait_until
from slowness import scaled

from distrun import templates

HOSTS = ("h1", "h2", "h3")
USER = "alice"
LIMIT_S = 60.0
TRAIN = """
import numpy as np
from distrun_runtime import kvstore

kv = kvstore.create("dist_sync")
random = np.random.default_rng(kv.rank)
x = random.normal(size=(64, 3))
y = x @ np.array([1.0, -2.0, 3.0])
weight = np.zeros(3)
kv.init("weight", weight)
kv.set_optimizer("sgd", learning_rate=0.2)
for _ in range(60):
    kv.pull("weight", out=weight)
    kv.push("weight", x.T @ (x @ weight - y) / len(x) / kv.num_workers)
kv.pull("weight", out=weight)
print("learned", *np.round(weight, 2))
"""


def loaded(name: str, *values: str) -> dict[str, Any]:
    """Return a rendered template as its program reads it; Compose makes `$` of `$$`."""
    text = templates.render(templates.find(name), values)
    return yaml.safe_load(text.replace("$$", "$") if name == "compose" else text)


def train(lab: Site, hosts: str, python: str) -> Done:
    """Train with a worker on each host and one server, from a folder that is copied to the hosts."""
    (lab.work / "train.py").write_text(TRAIN)
    words = ("-H", hosts, "-n", str(len(HOSTS)), "-s", "1", "--sync-dst-dir", "~/job")
    return lab.distrun("launch", *words, python, "train.py")


def assert_learned(done: Done) -> None:
    assert done.code == 0, done.err
    # Servers are placed first, and the one server is on the first host.
    hosts = (*HOSTS[1:], HOSTS[0])
    assert sorted(done.out.splitlines()) == [
        f"worker-{i}@{host} | learned 1.0 -2.0 3.0" for i, host in enumerate(hosts)
    ]


@pytest.fixture
def fresh(lab: Site) -> Iterator[Site]:
    """Hosts that keep nothing of the test, and a launcher who does not keep its keys."""
    keys = lab.file(lab.home / ".ssh")
    before = {path: path.read_bytes() for path in keys.iterdir() if path.is_file()}
    yield lab
    for path in keys.iterdir():
        path.unlink()
    for path, data in before.items():
        path.touch(mode=0o600)
        path.write_bytes(data)
    for name in HOSTS:
        lab[name].kill()
        lab[name].boot()


# dockerfile


@pytest.mark.parametrize("taken", [False, True])
def test_user_1000_of_an_image_is_train_whether_or_not_its_base_has_one(fresh: Site, taken: bool) -> None:
    host = fresh["h1"]
    host.exec("sh", "-c", "! user=$(id -nu 1000) || userdel --force $user")
    if taken:
        host.exec("useradd", "--uid", "1000", "ubuntu")
    text = templates.render(templates.find("dockerfile"))
    script = text[text.index("if user=") : text.index("# Not a virtual environment")]
    host.exec("bash", "-euc", script)
    name, _, uid, _, _, home, shell = host.exec("getent", "passwd", "1000").strip().split(":")
    assert (name, uid, home, shell) == ("train", "1000", "/srv/train", "/bin/bash")
    assert host.exec("stat", "--format=%u:%g", "/srv/train", "/keys", "/workspace").split() == ["1000:1000"] * 3


# compose


class Container:
    """A service of compose.yaml on a host of the lab, without root: its command runs there as the user alice."""

    def __init__(self, host: Host, service: dict[str, Any], folder: Path) -> None:
        host.exec("install", "-d", "-o", "alice", "/keys")
        host.exec("rm", "-rf", f"/home/{USER}/.ssh")
        # As in the image, users have a Python with numpy and pyzmq.
        host.exec("python3", "-m", "venv", "--without-pip", "/opt/python")
        (packages,) = (host.root / "opt/python/lib").glob("python3*/site-packages")
        (packages / "here.pth").write_text(wheels.SITE + "\n")
        env = {**service["environment"], "HOME": f"/home/{USER}"}
        words = [f"{name}={value}" for name, value in env.items()]
        argv = host.enter_argv("runuser", "-u", "alice", "--", "env", *words, *service["command"])
        self.keys = host.root / "keys"
        self.said = folder / f"{host.name}.said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        self.host = host
        self.health = service["healthcheck"]["test"][1]

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.said.read_text()
        argv = self.host.enter_argv("sh", "-c", self.health)
        return subprocess.run(argv, timeout=scaled(LIMIT_S), check=False).returncode == 0

    def stop(self) -> None:
        for process in self.host.processes():
            if process.inner != 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.process.wait(scaled(LIMIT_S))


@pytest.fixture
def containers(fresh: Site, tmp_path: Path) -> Iterator[list[Container]]:
    """The three hosts of compose.yaml, up and healthy; they share the folder of keys once `share` has copied it."""
    services = loaded("compose")["services"]
    made = [Container(fresh[name], services[name], tmp_path) for name in HOSTS]
    try:
        for each in made:
            wait_until(each.is_healthy, LIMIT_S, f"{each.host.name} is healthy")
        yield made
    finally:
        for each in made:
            each.stop()


def start_launcher(lab: Site, containers: list[Container], *command: str) -> Done:
    """Run the entry script of the launcher with a command, as `docker compose run launcher COMMAND` would."""
    service = loaded("compose")["services"]["launcher"]
    keys = lab.home_folder / "keys"
    keys.mkdir(exist_ok=True)
    for each in containers:
        (keys / f"{each.host.name}.pub").write_bytes((each.keys / f"{each.host.name}.pub").read_bytes())
    env = {**service["environment"], "KEYS": str(keys), "DISTRUN_HOSTFILE": str(lab.home / "hosts")}
    done = lab.run(*service["entrypoint"], *command, env=env)
    for each in containers:
        (each.keys / "launcher.pub").write_bytes((keys / "launcher.pub").read_bytes())
        os.chmod(each.keys / "launcher.pub", 0o644)
    return done


def test_a_job_trains_on_the_three_hosts_of_compose(fresh: Site, containers: list[Container]) -> None:
    lab = fresh
    for path in lab.file(lab.home / ".ssh").iterdir():
        path.unlink()
    done = start_launcher(lab, containers, "cat", str(lab.home / "hosts"))
    assert (done.code, done.out) == (0, "h1 port=2222\nh2 port=2222\nh3 port=2222\n"), done.err
    # Not of compose: there both ends have the same user.
    lab.file(lab.home / ".ssh/config").write_text("User alice\n")
    known = lab.file(lab.home / ".ssh/known_hosts").read_text()
    assert_learned(train(lab, str(lab.home / "hosts"), "/opt/python/bin/python3"))
    assert lab.file(lab.home / ".ssh/known_hosts").read_text() == known, "their keys were known before"
    assert re.findall(r"^\[(h\d)\]:2222 ssh-ed25519 \S+ \1$", known, re.MULTILINE) == list(HOSTS)


def test_keys_of_compose_are_made_once_and_are_private(fresh: Site, containers: list[Container]) -> None:
    lab = fresh
    for path in lab.file(lab.home / ".ssh").iterdir():
        path.unlink()
    key = lab.file(lab.home / ".ssh/id_ed25519")
    assert start_launcher(lab, containers, "true").code == 0
    made = key.read_bytes()
    assert start_launcher(lab, containers, "true").code == 0
    assert key.read_bytes() == made
    assert key.stat().st_mode & 0o777 == 0o600
    for each in containers:
        assert (each.host.root / f"home/{USER}/.ssh/host_key").stat().st_mode & 0o777 == 0o600
        assert sorted(path.name for path in each.keys.iterdir()) == [f"{each.host.name}.pub", "launcher.pub"]


def test_hosts_of_compose_let_in_nobody_else(fresh: Site, containers: list[Container]) -> None:
    lab = fresh
    for path in lab.file(lab.home / ".ssh").iterdir():
        path.unlink()
    assert start_launcher(lab, containers, "true").code == 0
    ssh = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-p", "2222")
    assert lab.run(*ssh, "alice@h1", "id -un").out == "alice\n"
    assert lab.run(*ssh, "root@h1", "true").code == 255
    lab.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(lab.work / "other"))
    other = lab.run(*ssh, "-o", "IdentitiesOnly=yes", "-i", str(lab.work / "other"), "alice@h1", "true")
    # `-i` adds to the user's own key only if that is configured, so it was this one that was refused.
    assert other.code == 255
    assert "Permission denied (publickey)" in other.err


# cloud-init


def set_up(lab: Site, name: str, data: dict[str, Any]) -> None:
    """Do to a host what cloud-init does with user data, but for packages: files, keys of the user, commands."""
    host = lab[name]
    for each in data["write_files"]:
        path = host.root / each["path"].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(each["content"])
        path.chmod(int(each["permissions"], 8))
    user = data["users"][1]
    keys = "".join(key + "\n" for key in user["ssh_authorized_keys"])
    (host.root / "home" / user["name"] / ".ssh/authorized_keys").write_text(keys)
    wheels.make(host.root / "root/wheels", "distrun", "torch")
    config = host.root / "root/.config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text("[install]\nno-index = true\nfind-links = /root/wheels\n")
    for command in data["runcmd"]:
        host.exec(*command, timeout_s=LIMIT_S * 2)


def test_a_job_trains_on_machines_that_cloud_init_set_up(fresh: Site) -> None:
    lab = fresh
    key = lab.file(lab.home / ".ssh/id_ed25519.pub").read_text().strip()
    data = loaded("cloud-init", f"key={key}", "user=alice", "hosts=h[1-3]", "packages=distrun torch")
    for name in HOSTS:
        set_up(lab, name, data)
    host = lab["h1"]
    hosts = (host.root / "etc/distrun/hosts").read_text()
    assert hosts == "h[1-3] python=/opt/distrun/bin/python3\n"
    lab.file(lab.home / ".ssh/config").write_text("User alice\n")
    done = train(lab, lab.hosts_file(*hosts.splitlines()), "/opt/distrun/bin/python3")
    assert_learned(done)
    # A second run, for example after the list of hosts has changed, is good too.
    host.exec("/usr/local/sbin/distrun-setup", timeout_s=LIMIT_S)
    assert (host.root / "etc/distrun/hosts").read_text() == hosts
    said = host.exec("runuser", "-l", "alice", "-c", "echo $DISTRUN_HOSTFILE; command -v python3")
    assert said.splitlines() == ["/etc/distrun/hosts", "/opt/distrun/bin/python3"]


def test_sshd_takes_the_settings_of_cloud_init(fresh: Site) -> None:
    files = loaded("cloud-init", "key=ssh-ed25519 AAAAC3NzaC1l ann")["write_files"]
    (settings,) = (each for each in files if "sshd" in each["path"])
    host = fresh["h1"]
    script = "cat >/tmp/sshd && /usr/sbin/sshd -T -f /tmp/sshd -h /etc/ssh/lab_host_key"
    shown = host.exec("sh", "-c", script, text=settings["content"]).splitlines()
    wanted = [line.lower() for line in settings["content"].splitlines()]
    assert len(wanted) == 4
    assert set(wanted) <= set(shown), shlex.join(shown)
