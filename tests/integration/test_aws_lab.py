"""The user data of the CloudFormation template, run on two hosts as at their first boot, and a job from there.

Stand-ins, of which each records what it is asked for: `mount` (a folder that both hosts share), `aws` (brings the
wheel), `cfn-signal`; and the metadata service. Everything else is real: users, keys, sshd, virtual environments, pip.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote

import pytest
import wheels
from awskit import Account, aws, aws_server
from hostlab import Unavailable
from lab import ROOT, Done, Site, shared_folders, skip, wait_until
from slowness import scaled

__all__ = ["aws", "aws_server"]
pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
ADDRESSES = {"h1": "10.0.0.10", "h2": "10.0.0.11"}
OPTIONS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"
WHEELS = ("click", "rich", "paramiko", "cryptography", "fabric", "numpy", "pyzmq")
LOG = "/run/asked"
LAST = "for last; do :; done\n"

METADATA = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if known else 400, "the-token")
    def do_GET(self):
        known = self.headers["X-aws-ec2-metadata-token"] == "the-token"
        self.answer(200 if known and self.path == "/latest/meta-data/local-ipv4" else 401, sys.argv[1])
    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
http.server.HTTPServer(("169.254.169.254", 80), Handler).serve_forever()
"""


class Cloud(Site):
    """A lab whose hosts have addresses of the template's network, and share a folder."""

    files: Path

    def prepare(self, name: str, aws_program: str) -> None:
        """Give a host what the image and EC2 give: a user with your key, host keys, an address, the services."""
        host = self[name]
        public = self.file(self.home / ".ssh/id_ed25519.pub").read_text()
        host.exec("useradd", "-m", "-s", "/bin/bash", "-p", "*", "ec2-user")
        host.exec("install", "-d", "-m", "700", "-o", "ec2-user", "-g", "ec2-user", "/home/ec2-user/.ssh")
        host.exec("tee", "/home/ec2-user/.ssh/authorized_keys", text=public)
        host.exec("sh", "-c", "rm -f /etc/ssh/ssh_host_* /etc/ssh/ssh_known_hosts; chmod 711 /root")
        host.exec("cp", "/etc/ssh/lab_host_key.pub", "/etc/ssh/ssh_host_ed25519_key.pub")
        host.exec("ip", "addr", "replace", ADDRESSES[name] + "/20", "dev", "eth0")
        host.exec("ip", "addr", "replace", "169.254.169.254/32", "dev", "lo")
        records = f'echo "$(basename "$0") $*" >>{LOG}\n'
        # The name of a new file system is not known at once.
        late = "[ -e /run/late ] || { touch /run/late; exit 32; }\n" if name == "h1" else ""
        programs = {
            "mount": records
            + late
            + 'for last; do :; done\nexec /usr/bin/mount --bind %s "$last"\n' % quote(str(self.files)),
            "mount.nfs4": "",
            "aws": records + aws_program,
            "cfn-signal": records,
            "python3.11": f'exec {quote(sys._base_executable)} "$@"\n',
        }
        for program, text in programs.items():
            host.exec("tee", "/usr/local/bin/" + program, text="#!/bin/sh\n" + text)
            host.exec("chmod", "755", "/usr/local/bin/" + program)
        wheels.make(host.root / "opt/wheels", *WHEELS)
        host.exec("tee", "/etc/pip.conf", text="[install]\nno-index = true\nfind-links = /opt/wheels\n")

    @contextlib.contextmanager
    def metadata(self, *names: str) -> Iterator[None]:
        """Serve the metadata on some hosts."""
        argv = ("python3.11", "-c", METADATA)
        running = [subprocess.Popen(self[name].enter_argv(*argv, ADDRESSES[name])) for name in names]
        try:
            for name in names:
                asks = partial(self[name].exec, "curl", "-sw", "%{http_code}", "http://169.254.169.254", check=False)
                wait_until(lambda asks=asks: "401" in asks(), 30, "the metadata service answers")
            yield
        finally:
            for process in self.processes():
                if process.host in names and b"169.254.169.254" in process.command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
            for one in running:
                one.wait(30)

    def asked(self, name: str) -> list[str]:
        """Return what a host asked the stand-ins for."""
        return (self[name].root / LOG.lstrip("/")).read_text().splitlines()

    def as_user(self, name: str, script: str) -> Done:
        """Run a script in a login shell, as you do who have logged in by ssh."""
        options = ("-o", "StrictHostKeyChecking=accept-new", "-o", "BatchMode=yes")
        login = "bash -lc " + quote(script)
        return self.run("ssh", *options, "ec2-user@" + ADDRESSES[name], login, timeout_s=300)


@pytest.fixture(scope="module")
def cloud_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    files = tmp_path_factory.mktemp("efs")
    files.chmod(0o755)
    try:
        site = Cloud.up(2, hide=[ROOT], share=[*shared_folders(), files])
    except Unavailable as why:
        skip(why)
    site.files = files
    site.inside("ip", "addr", "add", "10.0.0.1/20", "dev", "lab0")
    yield site
    site.down()


@pytest.fixture
def cloud(cloud_of_module: Cloud, tmp_path: Path) -> Iterator[Cloud]:
    cloud_of_module.begin(tmp_path)
    yield cloud_of_module
    for host in cloud_of_module.hosts.values():
        host.touched = True
        host.kill()
    cloud_of_module.end()


def boot(cloud: Cloud, user_data: str, *names: str) -> dict[str, tuple[int, str]]:
    """Run the user data on hosts at the same time; return the exit code and the output of each."""
    started = {}
    with cloud.metadata(*names):
        for name in names:
            cloud[name].exec("tee", "/run/user-data", text=user_data)
            argv = cloud[name].enter_argv("bash", "/run/user-data")
            started[name] = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        out = {name: process.communicate(timeout=scaled(400))[0] for name, process in started.items()}
    return {name: (process.returncode, out[name]) for name, process in started.items()}


def test_a_host_that_cannot_be_set_up_tells_the_stack_at_once_and_says_what_failed(cloud: Cloud, aws: Account) -> None:
    aws.create()
    cloud.prepare("h2", "echo 'fatal error: Access Denied' >&2\nexit 1\n")
    code, said = boot(cloud, aws.user_data(), "h2")["h2"]
    assert code == 1
    assert said.splitlines()[-1] == "distrun: 10.0.0.11: exit code 1 while installing s3://data/distrun.whl"
    assert cloud.asked("h2")[-1] == "cfn-signal --exit-code 1 --region eu-central-1 --stack train --resource Workers"


def test_a_host_that_waits_for_others_in_vain_says_how_many_came(cloud: Cloud, aws: Account) -> None:
    wheel = wheels.make_distrun(cloud.files, ROOT)
    aws.create(Package=f"s3://data/{wheel.name}")
    cloud.prepare("h2", f"{LAST}cp {quote(str(wheel))} $last\n")
    soon = aws.user_data().replace("SECONDS + 900", "SECONDS + 1")
    code, said = boot(cloud, soon, "h2")["h2"]
    assert code == 1
    why = "waiting for other hosts: 1 of 2 are there after 15 minutes"
    assert said.splitlines()[-1] == f"distrun: 10.0.0.11: exit code 1 while {why}"
    assert cloud.asked("h2")[-1].startswith("cfn-signal --exit-code 1 ")
    shutil.rmtree(cloud.files / ".distrun")


def test_a_worker_that_replaces_a_lost_one_takes_its_place_in_the_lists_of_all_hosts(
    cloud: Cloud, aws: Account
) -> None:
    wheel = wheels.make_distrun(cloud.files, ROOT)
    aws.create(Package=f"s3://data/{wheel.name}")
    register = cloud.files / ".distrun"
    register.mkdir()
    (register / "workers").write_text("10.0.0.10 slots=1\n10.0.0.12 slots=1\n")
    for address in (ADDRESSES["h1"], "10.0.0.12"):
        (register / f"{address}.host").write_text(f"{address} slots=1\n")
        (register / f"{address}.sshd").write_text(f"{address} ssh-ed25519 key-of-{address}\n")
        (register / f"{address}.user").write_text(f"ssh-ed25519 user-of-{address}\n")
    for name in ADDRESSES:
        cloud.prepare(name, f"{LAST}cp {quote(str(wheel))} $last\n")
    code, said = boot(cloud, aws.user_data(), "h2")["h2"]
    assert code == 0, said
    assert (register / "workers").read_text().splitlines() == ["10.0.0.10 slots=1", "10.0.0.11 slots=1"]
    known = (register / "known_hosts").read_text().splitlines()
    assert [line.split()[0] for line in known] == list(ADDRESSES.values())
    links = cloud["h2"].exec("readlink", "/opt/deeplearning/workers", "/etc/ssh/ssh_known_hosts")
    assert links.split() == ["/efs/.distrun/workers", "/efs/.distrun/known_hosts"]
    assert "user-of-10.0.0.12" not in cloud["h2"].exec("cat", "/home/ec2-user/.ssh/authorized_keys")
    shutil.rmtree(register)


def test_hosts_that_were_set_up_by_the_template_train_from_a_login_shell(cloud: Cloud, aws: Account) -> None:
    wheel = wheels.make_distrun(cloud.files, ROOT)
    stack = aws.create(Package="s3://data/" + wheel.name)
    for name in ADDRESSES:
        cloud.prepare(name, f"{LAST}cp {quote(str(wheel))} $last\n")
    booted = boot(cloud, aws.user_data(), *ADDRESSES)
    assert [code for code, _ in booted.values()] == [0, 0], booted

    # What the hosts asked for.
    (files,) = aws.found("efs", "describe_file_systems", "FileSystems[].FileSystemId")
    mount = f"mount -t nfs4 -o {OPTIONS} {files}.efs.eu-central-1.amazonaws.com:/ /efs"
    copy = f"aws s3 cp --only-show-errors --region eu-central-1 s3://data/{wheel.name} /opt/distrun/{wheel.name}"
    told = "cfn-signal --exit-code 0 --region eu-central-1 --stack train --resource "
    assert cloud.asked("h1") == [copy, mount, mount, told + "FirstHost"], "the first mount failed"
    assert cloud.asked("h2") == [copy, mount, told + "Workers"]

    # No secret is on the shared file system, and no user can write where keys are exchanged.
    register = cloud.files / ".distrun"
    assert stat.S_IMODE(register.stat().st_mode) == 0o755
    assert register.owner() == "root"
    of_hosts = [address + kind for address in ADDRESSES.values() for kind in (".host", ".sshd", ".user")]
    assert sorted(path.name for path in register.iterdir()) == sorted([*of_hosts, "known_hosts", "lock", "workers"])
    assert not any(b"PRIVATE" in path.read_bytes() for path in register.iterdir())

    # Each host accepts the other, and knows its key.
    for here, there in (("h1", "h2"), ("h2", "h1")):
        strictly = "ssh -o StrictHostKeyChecking=yes -o BatchMode=yes %s hostname" % ADDRESSES[there]
        assert cloud.as_user(here, strictly).out == there + "\n"

    shown = cloud.as_user("h1", "env; cat $DEEPLEARNING_WORKERS_PATH").out.splitlines()
    assert "DEEPLEARNING_WORKERS_PATH=/opt/deeplearning/workers" in shown
    assert "DEEPLEARNING_WORKERS_COUNT=2" in shown
    assert "DEEPLEARNING_WORKER_GPU_COUNT=0" in shown
    assert "EFS_MOUNT=/efs" in shown
    assert "AWS_DEFAULT_REGION=eu-central-1" in shown
    assert shown[-2:] == ["10.0.0.10 slots=1", "10.0.0.11 slots=1"]

    # The line that the stack gives out.
    for name, called in (("linear_async.py", "train.py"), ("arguments.py", "arguments.py")):
        shutil.copy(ROOT / "examples" / name, cloud.files / "jobs" / called)
    (launch,) = [one["OutputValue"] for one in stack["Outputs"] if one["OutputKey"] == "Launch"]
    done = cloud.as_user("h1", "cd /efs/jobs && " + launch)
    assert done.code == 0, done.err
    last = [line for line in done.out.splitlines() if "weight" in line]
    assert sorted(line.partition(" | ")[0] for line in last) == ["worker-0@10.0.0.10", "worker-1@10.0.0.11"]
    assert all("weight 2.0" in line or "weight 1.99" in line for line in last), last
