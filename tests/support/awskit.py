"""The fixture `aws`, an account of moto's imitation of AWS, and Amazon's command line for shell blocks of a page."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import jmespath
import pytest
from slowness import scaled

from distrun import templates

HERE = Path(__file__).resolve().parent
TEMPLATE = templates.render(templates.find("cloudformation"))
GIVEN = {"KeyName": "me", "SshAddress": "203.0.113.7", "Package": "s3://data/distrun.whl", "Bucket": "data"}
ID, SECRET, REGION = "nobody", "nothing", "eu-central-1"
KEYS = {"AWS_ACCESS_KEY_ID": ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": REGION}


class Account:
    """An empty AWS account, with its own server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, **words: Any) -> dict[str, Any]:
        """Call an operation such as `ec2`, `describe_vpcs`; return its answer."""
        if service not in self._clients:
            account = boto3.Session(ID, SECRET, region_name=REGION)
            self._clients[service] = account.client(service, endpoint_url=self.url)
        return getattr(self._clients[service], operation)(**words)

    def found(self, service: str, operation: str, query: str) -> list[Any]:
        """Return what a JMESPath query finds in the answer of an operation without arguments."""
        return list(jmespath.search(query, self.call(service, operation)) or [])

    def create(self, **parameters: str) -> dict[str, Any]:
        """Create the stack `train` from the template, as a user does; return how AWS describes it."""
        self.call("ec2", "create_key_pair", KeyName=GIVEN["KeyName"])
        given = [{"ParameterKey": name, "ParameterValue": value} for name, value in {**GIVEN, **parameters}.items()]
        more = {"Parameters": given, "Capabilities": ["CAPABILITY_IAM"]}
        self.call("cloudformation", "create_stack", StackName="train", TemplateBody=TEMPLATE, **more)
        (stack,) = self.call("cloudformation", "describe_stacks", StackName="train")["Stacks"]
        return dict(stack)

    def user_data(self) -> str:
        """Return what the only launch template gives to the machines that start by it."""
        (name,) = self.found("ec2", "describe_launch_templates", "LaunchTemplates[].LaunchTemplateId")
        answer = self.call("ec2", "describe_launch_template_versions", LaunchTemplateId=name)
        return base64.b64decode(answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"]).decode()

    def shell(self, script: str, cwd: Path) -> str:
        """Run bash, where `aws` is Amazon's own program on this account; return its stdout. It must succeed."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": str(cwd), "LANG": "C.UTF-8", "AWS_ENDPOINT_URL": self.url, "AWS_PAGER": "", **KEYS}
        argv = ["bash", "-eu", "-o", "pipefail", "-c", script]
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=scaled(300), check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def aws_server() -> Iterator[str]:
    """Serve AWS for all tests of a session; yield its address."""
    argv = [sys.executable, "-W", "ignore", str(HERE / "motoserver.py")]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        port = next((line.split()[1] for line in server.stdout if line.startswith("PORT ")), "")
        assert port, f"no server: run {shlex.join(argv)} to see why"
        yield "http://127.0.0.1:" + port
    finally:
        server.kill()  # its input ends, and it with that, if this process is killed
        server.communicate()


@pytest.fixture
def aws(aws_server: str) -> Account:
    """Give an empty account."""
    with urllib.request.urlopen(urllib.request.Request(aws_server + "/moto-api/reset", method="POST")):
        return Account(aws_server)
