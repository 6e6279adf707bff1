"""YARN's distributed shell: how a job is submitted where the services API is off and the program `yarn` is here.

It starts equal containers, all with one script, and needs Java on this machine. Place and container have one name, the
container's id. The script and the secret are uploaded by `yarn` into a folder of HDFS that only the user can enter.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrun import shell
from distrun.backends.engine import SECRET, EngineError
from distrun.backends.yarnreports import GPU, MIB, Container, listed
from distrun.errors import UsageError
from distrun.request import Needs
from distrun_runtime.contract.plan import SERVER, WORKER

if TYPE_CHECKING:
    from distrun.backends.engine import Group, Submission

MAIN = "org.apache.hadoop.yarn.applications.distributedshell.Client"
JAR = "hadoop-yarn-applications-distributedshell-*.jar"
SCRIPT = "agent.sh"
SECRET_FILE = "secret"
"""Name of the secret in `Submission.folder` and in a container."""
AM_LOGS = ("AppMaster.stderr", "AppMaster.stdout")
MASTER_MB = 512
"""Of the application master: the client's own default, 100 MiB, is too little where YARN watches memory."""
STARTED_S = 120.0
"""How long `yarn` may take until it says the application's id: it starts Java and uploads files."""
ASKED_S = 20.0
FOREVER_MS = 2**31 - 1
"""The shell's client would end the application after ten minutes; ours does not live so long."""


def program(config: Mapping[str, str]) -> str:
    """Return the path of `yarn`; empty: it is not here."""
    return shutil.which(config.get("yarn", "yarn")) or ""


def find_jar(yarn: str) -> str:
    """Return the path of the distributed shell's jar. Runs `yarn classpath`.

    Raises:
        EngineError: it is not found.
    """
    try:
        done = subprocess.run([yarn, "classpath"], capture_output=True, text=True, timeout=ASKED_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise EngineError(f"{yarn} classpath: {err}") from err
    folders = {
        os.path.dirname(each) if each.endswith((".jar", "*")) else each for each in done.stdout.strip().split(":")
    }
    found = sorted(path for folder in folders if folder for path in glob.glob(os.path.join(glob.escape(folder), JAR)))
    if not found:
        raise EngineError(f"no {JAR} on the class path of {yarn}", "say shell_jar = PATH in the section [yarn]")
    return found[-1]


def agent_script(submission: Submission) -> str:
    """Return the script that every container runs. Pure."""
    words = submission.bootstrap.command(submission.python, "env:CONTAINER_ID", SECRET)
    resolved = f'"$(readlink -f {SECRET_FILE})"'
    return "#!/bin/bash\nexec {}\n".format(
        " ".join(resolved if word == SECRET else shell.join([word]) for word in words)
    )


def largest(groups: Sequence[Group]) -> Needs:
    """Return what each container must have so that every task fits in it. Pure."""
    rows = [group.needs for group in groups]
    return Needs(*(max(column) for column in zip(*rows, strict=True)))


def command(submission: Submission, yarn: str, jar: str, memory_mb: int) -> tuple[str, ...]:
    """Return what submits the job. No word of it is secret. Pure."""
    options = submission.options
    needs = largest(submission.groups)
    megabytes = -(-needs.memory // MIB) or memory_mb
    resources = [f"memory-mb={megabytes}", f"vcores={max(1, needs.cores)}"]
    resources += [f"{GPU}={needs.gpus}"] if needs.gpus else []
    words = [yarn, "jar", jar, MAIN, "-jar", jar, "-appname", submission.marker, "-queue", options.queue or "default"]
    words += ["-num_containers", str(submission.tasks), "-container_resources", ",".join(resources)]
    words += ["-master_memory", str(MASTER_MB), "-timeout", str(FOREVER_MS)]
    words += ["-shell_script", str(submission.folder / SCRIPT), "-localize_files", str(submission.secret_file)]
    label, image = options.own.get("node_label", ""), options.own.get("docker_image", "")
    words += ["-node_label_expression", label] if label else []
    if image:
        words += ["-shell_env", "YARN_CONTAINER_RUNTIME_TYPE=docker"]
        words += ["-shell_env", f"YARN_CONTAINER_RUNTIME_DOCKER_IMAGE={image}"]
    return (*words, *options.args)


def submit(argv: Sequence[str], log: Path) -> str:
    """Run `yarn` until it has said the application's id, and return it. Its output goes to the file `log`.

    Raises:
        EngineError: it ended without, or took too long.
    """
    with log.open("wb") as out:
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        except OSError as err:
            raise EngineError(f"{argv[0]} cannot be started: {err.strerror}") from err
    until = time.monotonic() + STARTED_S
    try:
        while True:
            has_ended = child.poll() is not None
            said = log.read_text(encoding="utf-8", errors="replace")
            found = re.search(r"Submitted application (application_\d+_\d+)", said)
            if found:
                return found.group(1)
            if has_ended or time.monotonic() > until:
                last = _why(said)
                how = f"ended with {child.returncode}" if has_ended else f"said no application in {STARTED_S:g} s"
                raise EngineError(f"yarn {how}: {last}", f"read {log}")
            time.sleep(0.1)
    finally:
        # The application goes on without its client.
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _why(said: str) -> str:
    """Return what a Java program gives as its reason: its last line with an exception or error, else its last lines."""
    lines = said.strip().splitlines()
    errors = [line for line in lines if re.search(r"\b(\w+Exception|ERROR|FATAL|Error):? ", line)]
    return " ".join(errors[-1:] or lines[-3:])[:600]


def containers_of(said: Mapping[str, Any], servers: int) -> tuple[Container, ...]:
    """Return the containers that an attempt has, without the application master's: servers first. Pure.

    Whether their files are there already, nobody says.
    """
    rows = [(str(each.get("containerId", "")), each) for each in listed(said, "container")]
    rows += [(str(each.get("containerId", "")), each) for each in listed(said.get("containers"), "container")]
    ours = sorted((name, each) for name, each in rows if name and not name.endswith("_000001"))
    found = []
    for index, (name, each) in enumerate(ours):
        node = str(each.get("assignedNodeId") or each.get("nodeId") or "").partition(":")[0]
        found.append(Container(name, name, SERVER if index < servers else WORKER, node, "RUNNING", False))
    return tuple(found)


def refuse_args(args: Sequence[str]) -> None:
    """Raise UsageError for a word that only the services API understands."""
    for each in args:
        if each.startswith("{"):
            raise UsageError(
                "--engine-arg: the distributed shell takes its own words, not JSON",
                "say --engine-arg=-master_memory ...",
            )
