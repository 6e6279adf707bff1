"""`distrun launch --launcher kubernetes`: one Indexed Job by kubectl; each of its pods is a place with one task."""

import json
from typing import Any

from distrun.backends import engine

INDEX = "batch.kubernetes.io/job-completion-index"
REASONS = {"OOMKilled": (137, "out of memory; raise --worker-memory"), "Evicted": (7, "evicted")}


class Kubernetes(engine.Engine):
    """A cluster that kubectl reaches. `image` in the configuration file's section: one that has python3."""

    name = "kubernetes"

    def render(self, submission: engine.Submission) -> engine.Script:
        roles = [group.role for group in submission.groups for _ in range(group.count)]
        head = {"name": submission.marker, "labels": {"app": "distrun"}, "annotations": {"roles": " ".join(roles)}}
        needs = max(group.needs for group in submission.groups)  # all pods of a Job ask for the same
        limits = {"cpu": needs.cores, "memory": needs.memory, "nvidia.com/gpu": needs.gpus}
        start = submission.bootstrap.command(submission.python, "env:JOB_COMPLETION_INDEX", "env:ENROLMENT")
        agent = {
            "name": "agent", "image": submission.options.config.get("image", "python:3"), "command": list(start),
            "env": [{"name": "ENROLMENT", "valueFrom": {"secretKeyRef": {"name": head["name"], "key": "enrolment"}}}],
            "resources": {"limits": {what: amount for what, amount in limits.items() if amount}},
        }  # fmt: skip
        spec = {
            "completions": len(roles), "parallelism": len(roles), "completionMode": "Indexed", "backoffLimit": 0,
            "template": {"spec": {"restartPolicy": "Never", "containers": [agent]}},
        }  # fmt: skip
        items = [
            {"apiVersion": "v1", "kind": "Secret", "metadata": head, "stringData": {"enrolment": submission.secret}},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": head, "spec": spec},
        ]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1)
        return engine.Script({"job.json": text}, (("kubectl", "create", "-f", f"{submission.folder}/job.json"),))

    def look(self, handle: engine.Handle) -> engine.QueueStatus:
        jobs = items("jobs", f"--field-selector=metadata.name={handle.id}")
        ends = [each for job in jobs for each in job["status"].get("conditions", ()) if each["status"] == "True"]
        if not jobs or any(each["type"] in ("Complete", "Failed") for each in ends):
            return engine.QueueStatus(engine.ENDED, " ".join(each.get("message", "") for each in ends))
        pods = {pod["metadata"]["annotations"][INDEX]: pod for pod in items("pods", f"--selector=job-name={handle.id}")}
        roles = jobs[0]["metadata"]["annotations"]["roles"].split()
        nodes = [pods.get(str(i), {"spec": {}})["spec"].get("nodeName") for i in range(len(roles))]
        if not all(nodes):
            return engine.QueueStatus(engine.QUEUED, f"{sum(map(bool, nodes))} of {len(nodes)} pods have a node")
        grants = [engine.Grant(str(i), nodes[i], {role: 1}) for i, role in enumerate(roles)]
        gone = {index: "its pod failed" for index, pod in pods.items() if pod["status"]["phase"] == "Failed"}
        return engine.QueueStatus(engine.RUNNING, "", tuple(grants), gone)

    def cancel(self, handle: engine.Handle) -> None:
        kubectl("delete", "job,secret", handle.id, "--ignore-not-found", "--cascade=foreground")

    def explain(self, handle: engine.Handle, place: str) -> engine.Explanation | None:
        for pod in items("pods", f"--selector=job-name={handle.id}"):
            ends = [each["state"].get("terminated", {}) for each in pod["status"].get("containerStatuses", ())]
            for reason in (each.get("reason") for each in (*ends, pod["status"])):
                if reason in REASONS and place in ("", pod["metadata"]["annotations"][INDEX]):
                    return engine.Explanation(REASONS[reason][0], f"Kubernetes: {REASONS[reason][1]}")
        return None

    def find(self) -> list[engine.FoundJob]:
        names = [job["metadata"]["name"] for job in items("jobs", "--selector=app=distrun")]
        return [engine.FoundJob(engine.Handle(self.name, name), name, "there") for name in names]

    def examine(self) -> list[engine.CheckResult]:
        may_create = kubectl("auth", "can-i", "create", "jobs").strip() == "yes"
        return [engine.CheckResult(may_create, "jobs may be created", "ask the cluster's administrators for that")]


def items(*words: str) -> list[dict[str, Any]]:
    """Return objects of the cluster."""
    return list(json.loads(kubectl("get", *words, "-o", "json"))["items"])


def kubectl(*words: str) -> str:
    """Return what kubectl prints. Raises EngineError with what it says."""
    return engine.ask(("kubectl", *words), "kubectl cluster-info shows whether it reaches the cluster")
