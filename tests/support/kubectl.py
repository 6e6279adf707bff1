"""A stand-in for kubectl: answers as one did, in the form of the API's objects, and runs pods as processes here.

`$KUBECTL` is its folder: `JOB.json` is a job with its pods. A file `pending` keeps pods from getting a node. Each call
is a line of `calls`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from distrun_runtime.contract import process

FOLDER = Path(os.environ.get("KUBECTL", "/nowhere"))
INDEX = "batch.kubernetes.io/job-completion-index"


def create(path: str) -> None:
    secret, job = json.loads(Path(path).read_text())["items"]
    assert (secret["kind"], job["kind"]) == ("Secret", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["backoffLimit"] == 0
    (agent,) = job["spec"]["template"]["spec"]["containers"]
    assert agent["env"][0]["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]
    value = {"job": job, "secret": secret["stringData"]["enrolment"], "pids": []}
    (FOLDER / f"{job['metadata']['name']}.json").write_text(json.dumps(value))
    print(f"secret/{secret['metadata']['name']} created\njob.batch/{job['metadata']['name']} created")


def stored(name: str) -> dict[str, Any] | None:
    """Return a job, its pods started if they have a node."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return None
    value: dict[str, Any] = json.loads(path.read_text())
    if not value["pids"] and not (FOLDER / "pending").exists():
        (agent,) = value["job"]["spec"]["template"]["spec"]["containers"]
        for index in range(value["job"]["spec"]["completions"]):
            env = {**os.environ, "ENROLMENT": value["secret"], "JOB_COMPLETION_INDEX": str(index)}
            nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            child = subprocess.Popen(agent["command"], env=env, start_new_session=True, **nothing)
            value["pids"].append(process.identity(child.pid))
        path.write_text(json.dumps(value))
    return value


def get(kind: str, selector: str) -> None:
    name = selector.rpartition("=")[2]
    names = [path.stem for path in FOLDER.glob("distrun-*.json")] if selector.endswith("app=distrun") else [name]
    found = []
    for value in filter(None, map(stored, names)):
        living = [process.is_alive(process.Identity(*each)) for each in value["pids"]]
        if kind == "jobs":
            ended = [{"type": "Complete", "status": "True"}] if living and not any(living) else []
            found.append({**value["job"], "status": {"conditions": ended}})
        else:
            found += [
                {
                    "metadata": {"annotations": {INDEX: str(index)}},
                    "spec": {"nodeName": f"node-{index % 2}"},
                    "status": {"phase": "Running" if is_there else "Succeeded"},
                }
                for index, is_there in enumerate(living)
            ]
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": found}))


def delete(name: str) -> None:
    value = json.loads((FOLDER / f"{name}.json").read_text()) if (FOLDER / f"{name}.json").exists() else {"pids": []}
    for pid, start in value["pids"]:
        if process.is_alive(process.Identity(pid, start)):
            os.killpg(pid, signal.SIGTERM)
    (FOLDER / f"{name}.json").unlink(missing_ok=True)


def main(words: list[str]) -> None:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    match words:
        case ["create", "-f", path]:
            create(path)
        case ["get", kind, selector, "-o", "json"]:
            get(kind, selector)
        case ["delete", "job,secret", name, "--ignore-not-found", "--cascade=foreground"]:
            delete(name)
        case ["auth", "can-i", "create", "jobs"]:
            print("yes")
        case _:
            sys.exit(f"error: unknown command {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
