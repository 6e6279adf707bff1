"""The program of the helper process. It queries disks, GPUs and, where only `ps` knows them, processes.

Each query may block. The program runs in its own process (`helper.py`), with any Python 3, so it imports nothing of
distrun. It reads requests from standard input, one a line: `{"what": "disk", "path": ...}`. It answers
`{"what": ..., "value": ...}`; a null value means that there is none. It ends when its input ends.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional

SMI_GPUS = "uuid,index,utilization.gpu,memory.total,memory.used,name"
SMI_APPS = "gpu_uuid,pid,used_memory"
SMI_S = 8.0
"""How long `nvidia-smi` may take. Less than the helper may: then it goes on without it."""
MIB = 1024 * 1024


def disk(request: Dict[str, Any]) -> Dict[str, int]:
    """Return the size of a folder's disk, and what is free for us, in bytes."""
    info = os.statvfs(os.path.expanduser(request["path"] or "~"))
    return {"total": info.f_blocks * info.f_frsize, "free": info.f_bavail * info.f_frsize}


def processes(request: Dict[str, Any]) -> Optional[str]:
    """Return what ps prints, for `sampling.ps`."""
    return _output(["ps", "-A", "-o", "pid=,ppid=,pgid=,rss=,time="])


def gpus(request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Return `how` it was found out, and the GPUs by the names of the frame `metrics`; None if there is no driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # it is not there, or finds no driver, or is another module of that name
        return _of_smi()
    return {"how": "nvml", "gpus": [_of_nvml(nvml, at) for at in range(nvml.nvmlDeviceGetCount())]}


def _of_nvml(nvml: Any, at: int) -> Dict[str, Any]:
    gpu = nvml.nvmlDeviceGetHandleByIndex(at)
    memory = _asked(nvml.nvmlDeviceGetMemoryInfo, gpu)
    used = _asked(nvml.nvmlDeviceGetUtilizationRates, gpu)
    users = _asked(nvml.nvmlDeviceGetComputeRunningProcesses, gpu)
    found = {
        "uuid": _text(_asked(nvml.nvmlDeviceGetUUID, gpu)),
        "index": at,
        "name": _text(_asked(nvml.nvmlDeviceGetName, gpu)),
        "util": None if used is None else used.gpu / 100,
        "mem_total": None if memory is None else memory.total,
        "mem_used": None if memory is None else memory.used,
        "pids": {str(each.pid): each.usedGpuMemory for each in users or ()},
    }
    return _known(found)


def _asked(question: Any, gpu: Any) -> Any:
    """Return what the driver says; None if this GPU does not tell."""
    try:
        return question(gpu)
    except Exception:
        return None


def _text(name: Any) -> Any:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name


def _of_smi() -> Optional[Dict[str, Any]]:
    if shutil.which("nvidia-smi") is None:
        return None
    text = _output(["nvidia-smi", "--query-gpu=" + SMI_GPUS, "--format=csv,noheader,nounits"])
    apps = _output(["nvidia-smi", "--query-compute-apps=" + SMI_APPS, "--format=csv,noheader,nounits"])
    return {"how": "smi", "gpus": of_csv(text or "", apps or "")}


def of_csv(text: str, apps: str) -> List[Dict[str, Any]]:
    """Return the GPUs that `nvidia-smi` lists, with their processes. What it does not know is left out."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 5)]  # a name may hold commas
        if len(cells) == 6 and cells[0].startswith("GPU-"):
            uuid, index, used, total, memory, name = cells
            row = {
                "uuid": uuid,
                "index": _number(index),
                "name": None if name.startswith("[") else name,
                "util": _number(used, 0.01),
                "mem_total": _number(total, MIB),
                "mem_used": _number(memory, MIB),
                "pids": {},
            }
            found[uuid] = _known(row)
    for line in apps.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0] in found and cells[1].isdigit():
            found[cells[0]]["pids"][cells[1]] = _number(cells[2], MIB)
    return list(found.values())


def _number(text: str, unit: float = 1) -> Any:
    """Return a number; None of what is not known, such as [N/A] or [Not Supported]."""
    try:
        return round(float(text) * unit, 4) if unit < 1 else int(float(text) * unit)
    except (ValueError, OverflowError):
        return None


def _known(row: Dict[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _output(words: List[str]) -> Optional[str]:
    """Return what a program prints; None if it is not there, fails, or does not end."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


LOOKS = {"disk": disk, "gpus": gpus, "ps": processes}


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            value = LOOKS[request["what"]](request)
        except Exception:
            value = None
        sys.stdout.write(json.dumps({"what": request["what"], "value": value}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
