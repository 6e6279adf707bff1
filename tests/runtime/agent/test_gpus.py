"""What an agent finds out of its GPUs, from stand-ins of NVIDIA's library and nvidia-smi; and what tasks then see."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvidia
import pytest
from sample_plan import sample_plan

from distrun_runtime.agent import commands, helper
from distrun_runtime.agent.share import Share
from distrun_runtime.contract.gpus import Gpu, HostGpus
from distrun_runtime.errors import PreflightFailure

FOUR = HostGpus("nvml", "550", tuple(Gpu(number, f"GPU-{number}") for number in range(4)))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvidia.library(tmp_path_factory.mktemp("nvml")).parent


Look = Callable[..., HostGpus]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Ask the driver in an environment of the test's own."""

    def look(*folders: Path, limit_s: float = helper.LIMIT_S, **env: object) -> HostGpus:
        made = {"PATH": str(tmp_path), "LD_LIBRARY_PATH": ":".join(map(str, folders))}
        made.update((name, str(value)) for name, value in env.items())
        asked = helper.command({"DISTRUN_JOB_ID": "x"})
        assert asked.env[b"DISTRUN_JOB_ID"] == b"x"
        own = {os.fsencode(name): os.fsencode(value) for name, value in made.items()}
        return helper.told(commands.run(asked._replace(env=own, limit_s=limit_s)))

    return look


def test_the_drivers_library_tells_of_gpus_and_their_instances(look: Look, libraries: Path) -> None:
    found = look(libraries, NVML_GPUS=2)
    gib = 40 << 30
    assert found == HostGpus(
        "nvml",
        "550.54.15",
        (Gpu(0, "GPU-0000", "NVIDIA A100", gib), Gpu(1, "GPU-0001", "NVIDIA A100", gib)),
    )
    divided = look(libraries, NVML_GPUS=2, NVML_MIG=1)
    assert divided.names == ("0", "MIG-0010", "MIG-0012", "MIG-0014", "MIG-0016")
    assert look(libraries, NVML_GPUS=3, NVML_FORBIDDEN=0).names == ("0", "1"), "numbers are of those that may be used"
    assert look(libraries) == HostGpus("nvml", "550.54.15"), "there is a driver, and no GPU"


def test_without_the_library_nvidia_smi_is_asked(look: Look, tmp_path: Path, libraries: Path) -> None:
    nvidia.smi(tmp_path)
    path = f"{tmp_path}:/usr/bin:/bin"
    found = look(PATH=path, SMI_GPUS=2)
    assert (found.how, found.driver, found.names) == ("smi", "550.54", ("0", "1"))
    assert found.gpus[1] == Gpu(1, "GPU-0001", "NVIDIA H100, 80GB", 81559 << 20)
    assert look(PATH=path, SMI_GPUS=2, SMI_MIG=1).names == ("0", "MIG-0001")
    assert look(libraries, PATH=path, NVML_INIT=18, SMI_GPUS=1).how == "smi", "also where the library does not work"


def test_a_driver_that_tells_nothing_says_why(look: Look, tmp_path: Path, libraries: Path) -> None:
    assert look() == HostGpus(), "there is none"
    mismatch = "libnvidia-ml.so.1: RM has detected an NVML/RM version mismatch."
    assert look(libraries, NVML_INIT=18) == HostGpus(error=mismatch)
    nvidia.smi(tmp_path)
    assert look(PATH=f"{tmp_path}:/usr/bin:/bin", SMI_SAYS="NVML: mismatch") == HostGpus(error="NVML: mismatch")


def test_a_driver_that_hangs_is_not_waited_for(look: Look, libraries: Path) -> None:
    found = look(libraries, NVML_HANGS=1, limit_s=0.5)
    assert found == HostGpus(error=f"NVIDIA's driver did not answer within {helper.LIMIT_S:g} s")


def share(
    found: HostGpus,
    ranges: list[tuple[int, int] | None],
    *,
    said: str = "",
    each: int = 0,
    base: str | None = None,
    **env: str,
) -> Share:
    """Return an agent's share of a job with servers, whose workers get these GPUs, as preflight leaves it."""
    plan = sample_plan(workers=len(ranges), servers=1)
    workers = [
        task._replace(gpus=ranges[task.rank], env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if "order" not in env else {})
        for task in plan.of_role("worker")
    ]
    others = [task._replace(gpus=(0, 0) if each else ranges[0]) for task in plan.tasks if task.role != "worker"]
    host = plan.hosts[0]._replace(gpus=said, named="hosts:1" if said else "")
    plan = plan._replace(tasks=(*others, *workers), hosts=(host,), gpus_per_worker=each)
    inherited = {} if base is None else {b"CUDA_VISIBLE_DEVICES": base.encode()}
    inherited.update((name.encode(), value.encode()) for name, value in env.items() if name != "order")
    made = Share(plan, "d1", "127.0.0.1", {}, "/", "", {}, base=inherited, place="d1", devices=found)
    return helper.chosen(made)


def seen(made: Share) -> list[Any]:
    values = [made.environment(task, task.env).get(b"CUDA_VISIBLE_DEVICES") for task in made.plan.of_role("worker")]
    return [None if value is None else value.decode() for value in values]


@pytest.mark.parametrize(
    ("said", "each", "base", "expected"),
    [
        ("4", 0, None, ["0,1,2,3", "0,1,2,3"]),
        ("2", 0, "3,1,2", ["3,1", "3,1"]),
        ("", 2, None, ["0,1", "2,3"]),
        ("", 1, "3,1", ["3", "1"]),
        ("3,1", 1, None, ["3", "1"]),
        ("3,2", 1, "1,2,3", ["3", "2"]),
    ],
)
def test_tasks_see_what_the_place_has_narrowed(said: str, each: int, base: str | None, expected: list[str]) -> None:
    ranges: list[tuple[int, int] | None] = [(0, each), (each, each)] if each else [(0, int(said))] * 2
    made = share(FOUR, ranges, said=said, each=each, base=base)
    assert seen(made) == expected
    server = made.plan.task("server-0")
    assert made.environment(server, {})[b"CUDA_VISIBLE_DEVICES"].decode() == ("" if each else expected[0])


def test_a_value_of_the_users_own_is_left_alone() -> None:
    made = share(FOUR, [None, (1, 1)], each=1, base="2,3")
    task = made.plan.task("worker-0")
    assert made.environment(task, {"CUDA_VISIBLE_DEVICES": "7"})[b"CUDA_VISIBLE_DEVICES"] == b"7"
    chosen = share(FOUR, [(0, 1)], each=1, order="theirs")
    env = chosen.environment(chosen.plan.task("worker-0"), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert (env[b"CUDA_VISIBLE_DEVICES"], env[b"CUDA_DEVICE_ORDER"]) == (b"0", b"FASTEST_FIRST")


@pytest.mark.parametrize(
    ("found", "said", "each", "base", "text"),
    [
        (FOUR, "8", 0, None, "gpus=8 for d1 (hosts:1), but there are 4 GPUs"),
        (FOUR, "", 4, None, "2 workers on d1 with --gpus-per-worker 4 need 8 GPUs, but there are 4 GPUs"),
        (FOUR, "", 2, "1,2", "but there are 2 GPUs (1,2, CUDA_VISIBLE_DEVICES=1,2 of its agent)"),
        (
            HostGpus(),
            "",
            1,
            None,
            "it is unknown how many GPUs d1 has: neither the library of NVIDIA's driver nor",
        ),
        (HostGpus(error="mismatch"), "", 1, None, "it is unknown how many GPUs d1 has: mismatch"),
    ],
)
def test_a_host_with_too_few_gpus_is_refused(
    found: HostGpus, said: str, each: int, base: str | None, text: str
) -> None:
    with pytest.raises(PreflightFailure) as caught:
        share(found, [(0, each or 1), (each, each or 1)], said=said, each=each, base=base)
    assert text in str(caught.value)
    assert caught.value.kind == "gpus"
    assert caught.value.fix


def test_a_driver_is_not_asked_for_tasks_that_get_no_gpu() -> None:
    plan = sample_plan(workers=1, servers=1)
    assert not plan.gives_gpus
    assert not plan._replace(tasks=tuple(task._replace(gpus=(0, 0)) for task in plan.tasks)).gives_gpus
    assert plan._replace(tasks=tuple(task._replace(gpus=(0, 1)) for task in plan.tasks)).gives_gpus


def test_ready_says_what_was_found() -> None:
    made = share(FOUR, [(0, 1)], each=1, base="3,2")
    assert helper.report(made) == {
        "how": "nvml",
        "driver": "550",
        "kinds": "4 x of unknown kind",
        "error": "",
        "visible": ["3", "2"],
    }
