"""The program of the helper process. It queries disks, GPUs and, where only `ps` knows them, processes.

Each query may block. The program runs in its own process (`helper.py`), with any Python 3, so it imports nothing of
distrun. It reads requests from standard input, one a line: `{"what": "disk", "path": ...}`. It answers
`{"what": ..., "value": ...}`; a null value means that there is none. It ends when its input ends. With `what` and the
number of a descriptor as arguments, it writes the value of that one query to the descriptor and ends.

GPUs are queried by NVIDIA's library (NVML), which comes with the driver; without it by the program `nvidia-smi`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any, Dict, List, Optional

LIBRARY = "libnvidia-ml.so.1"
SMI_GPUS = "uuid,index,utilization.gpu,memory.total,memory.used,name"
SMI_APPS = "gpu_uuid,pid,used_memory"
SMI_DEVICES = "uuid,index,driver_version,memory.total,name"
SMI_S = 8.0
"""How long `nvidia-smi` may take. Less than the helper may: then it goes on without it."""
MIB = 1024 * 1024
PROCESSES = 512
"""Of one GPU that are told of, at most."""
UNKNOWN = 0xFFFFFFFFFFFFFFFF
"""Stands for memory that the driver does not tell."""


def disk(request: Dict[str, Any]) -> Dict[str, int]:
    """Return the size of a folder's disk, and what is free for us, in bytes."""
    info = os.statvfs(os.path.expanduser(request["path"] or "~"))
    return {"total": info.f_blocks * info.f_frsize, "free": info.f_bavail * info.f_frsize}


def processes(request: Dict[str, Any]) -> Optional[str]:
    """Return what ps prints, for `sampling.ps`."""
    text: Optional[str] = _output(["ps", "-A", "-o", "pid=,ppid=,pgid=,rss=,time="])[0]
    return text


def gpus(request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Return `how` it was found out, and the GPUs by the names of the frame `metrics`; None if there is no driver."""
    try:
        nvml = Nvml()
    except NoDriver:
        return _of_smi()
    return {"how": "nvml", "gpus": [_known(nvml.usage(gpu, at)) for at, gpu in enumerate(nvml.gpus())]}


def devices(request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what does not change: `how` it was found out (empty: by nothing), `driver`, its version, and the GPUs.

    Of each `number`, `uuid`, `name`, `memory` (bytes) and, if it is divided, `instances`, the UUIDs of its MIG
    instances. `error` says why a driver that is there tells nothing.
    """
    try:
        nvml = Nvml()
    except NoDriver as err:
        error = str(err)
    else:
        found = [_known(nvml.identity(gpu, at)) for at, gpu in enumerate(nvml.gpus())]
        return {"how": "nvml", "driver": nvml.driver() or "", "gpus": found}
    if shutil.which("nvidia-smi") is None:
        return {"how": "", "gpus": [], "error": error}
    text, fault = _output(["nvidia-smi", "--query-gpu=" + SMI_DEVICES, "--format=csv,noheader,nounits"])
    if text is None:
        return {"how": "", "gpus": [], "error": fault or error}
    return dict(devices_of_csv(text, _output(["nvidia-smi", "-L"])[0] or ""), how="smi")


class NoDriver(Exception):
    """NVIDIA's library cannot be used. The text says why; it is empty if the library is not there."""


class Nvml:
    """NVIDIA's library. What a GPU, or an old driver, does not tell is None. Raises NoDriver."""

    def __init__(self) -> None:
        try:
            import ctypes  # not every Python has it

            self._library = ctypes.CDLL(LIBRARY)
        except (ImportError, OSError):
            raise NoDriver("") from None
        self._c: Any = ctypes
        code = self._call("nvmlInit_v2")
        if code != 0:
            raise NoDriver(f"{LIBRARY}: {self._words(code)}")

    def gpus(self) -> List[Any]:
        """Return the GPUs that this process may use, in the order of their PCI addresses."""
        count = self._number("nvmlDeviceGetCount_v2") or 0
        found = [self._handle("nvmlDeviceGetHandleByIndex_v2", self._c.c_uint(at)) for at in range(count)]
        return [each for each in found if each is not None]

    def driver(self) -> Optional[str]:
        """Return the driver's version."""
        return self._text("nvmlSystemGetDriverVersion")

    def identity(self, gpu: Any, at: int) -> Dict[str, Any]:
        """Return what does not change of a GPU."""
        memory = self._numbers("nvmlDeviceGetMemoryInfo", gpu, self._c.c_ulonglong * 3)
        return {
            "number": at,
            "uuid": self._text("nvmlDeviceGetUUID", gpu),
            "name": self._text("nvmlDeviceGetName", gpu),
            "memory": memory and memory[0],
            "instances": self._instances(gpu),
        }

    def usage(self, gpu: Any, at: int) -> Dict[str, Any]:
        """Return how busy a GPU is, and what it is."""
        memory = self._numbers("nvmlDeviceGetMemoryInfo", gpu, self._c.c_ulonglong * 3)  # total, free, used
        use = self._numbers("nvmlDeviceGetUtilizationRates", gpu, self._c.c_uint * 2)  # of the GPU, of its memory
        return {
            "uuid": self._text("nvmlDeviceGetUUID", gpu),
            "index": at,
            "name": self._text("nvmlDeviceGetName", gpu),
            "util": use and use[0] / 100,
            "mem_total": memory and memory[0],
            "mem_used": memory and memory[2],
            "pids": self._processes(gpu),
        }

    def _instances(self, gpu: Any) -> Optional[List[str]]:
        """Return the UUIDs of a GPU's MIG instances; None: it is not divided."""
        now, later = self._c.c_uint(), self._c.c_uint()
        if self._call("nvmlDeviceGetMigMode", gpu, self._c.byref(now), self._c.byref(later)) != 0 or not now.value:
            return None
        count = self._number("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0
        found = [self._handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, self._c.c_uint(at)) for at in range(count)]
        names = [self._text("nvmlDeviceGetUUID", each) for each in found if each is not None]
        return [name for name in names if name]

    def _processes(self, gpu: Any) -> Dict[str, Optional[int]]:
        """Return the memory of the processes that use a GPU (None: not told), by process id."""
        # A row is process id, padding, memory; of the newer functions also the numbers of a MIG instance.
        for version, words in (("_v3", 3), ("_v2", 3), ("", 2)):
            rows, count = (self._c.c_ulonglong * (words * PROCESSES))(), self._c.c_uint(PROCESSES)
            name = "nvmlDeviceGetComputeRunningProcesses" + version
            if self._call(name, gpu, self._c.byref(count), rows) == 0:
                each = [(rows[at] & 0xFFFFFFFF, rows[at + 1]) for at in range(0, words * count.value, words)]
                return {str(pid): None if used == UNKNOWN else used for pid, used in each}
        return {}

    def _call(self, name: str, *words: Any) -> int:
        """Return the code that a function ends with; -1: this driver has none of that name."""
        try:
            return int(getattr(self._library, name)(*words))
        except AttributeError:
            return -1

    def _number(self, name: str, *words: Any) -> Optional[int]:
        value = self._c.c_uint()
        return value.value if self._call(name, *words, self._c.byref(value)) == 0 else None

    def _handle(self, name: str, *words: Any) -> Any:
        value = self._c.c_void_p()
        return value if self._call(name, *words, self._c.byref(value)) == 0 else None

    def _text(self, name: str, *words: Any) -> Optional[str]:
        buffer = self._c.create_string_buffer(96)
        found = self._call(name, *words, buffer, self._c.c_uint(96)) == 0
        return buffer.value.decode("utf-8", "replace") if found else None

    def _numbers(self, name: str, gpu: Any, kind: Any) -> Any:
        value = kind()
        return value if self._call(name, gpu, self._c.byref(value)) == 0 else None

    def _words(self, code: int) -> str:
        """Return what an error's code means."""
        try:
            self._library.nvmlErrorString.restype = self._c.c_char_p
            return str(self._library.nvmlErrorString(code).decode("utf-8", "replace"))
        except AttributeError:
            return f"error {code}"


def _of_smi() -> Optional[Dict[str, Any]]:
    if shutil.which("nvidia-smi") is None:
        return None
    text, _ = _output(["nvidia-smi", "--query-gpu=" + SMI_GPUS, "--format=csv,noheader,nounits"])
    apps, _ = _output(["nvidia-smi", "--query-compute-apps=" + SMI_APPS, "--format=csv,noheader,nounits"])
    return {"how": "smi", "gpus": of_csv(text or "", apps or "")}


def of_csv(text: str, apps: str) -> List[Dict[str, Any]]:
    """Return the GPUs that `nvidia-smi` lists, with their processes. What it does not know is left out."""
    found = {}
    for uuid, index, used, total, memory, name in _rows(text, 6):
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


def devices_of_csv(text: str, listed: str) -> Dict[str, Any]:
    """Return `driver` and `gpus` of what `nvidia-smi` tells; `listed` is what `nvidia-smi -L` prints."""
    found = []
    driver = ""
    instances = _instances_of(listed)
    for at, (uuid, _, version, total, name) in enumerate(_rows(text, 5)):
        row = {
            "number": at,
            "uuid": uuid,
            "name": None if name.startswith("[") else name,
            "memory": _number(total, MIB),
            "instances": instances.get(uuid),
        }
        driver = driver or version
        found.append(_known(row))
    return {"driver": driver, "gpus": found}


def _instances_of(listed: str) -> Dict[str, List[str]]:
    """Return the MIG instances of the GPUs that have some, by UUID, of what `nvidia-smi -L` prints."""
    found: Dict[str, List[str]] = {}
    gpu = ""
    for line in listed.splitlines():
        uuid = line.rpartition("UUID: ")[2].strip().rstrip(")")
        if uuid.startswith("GPU-"):
            gpu = uuid
        elif uuid.startswith("MIG-"):
            found.setdefault(gpu, []).append(uuid)
    return found


def _rows(text: str, count: int) -> List[List[str]]:
    """Return the rows of GPUs: so many cells, the UUID first. The last, a name, may hold commas."""
    rows = [[cell.strip() for cell in line.split(",", count - 1)] for line in text.splitlines()]
    return [cells for cells in rows if len(cells) == count and cells[0].startswith("GPU-")]


def _number(text: str, unit: float = 1) -> Any:
    """Return a number; None of what is not known, such as [N/A] or [Not Supported]."""
    try:
        return round(float(text) * unit, 4) if unit < 1 else int(float(text) * unit)
    except (ValueError, OverflowError):
        return None


def _known(row: Dict[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _output(words: List[str]) -> Any:
    """Return what a program prints, and None and why if it is not there, fails, or does not end."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=SMI_S, check=False)
    except OSError as err:
        return None, f"{words[0]}: {err.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{words[0]} did not answer within {SMI_S:g} s"
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode == 0:
        return text, ""
    said = [line.strip() for line in (done.stderr.decode("utf-8", "replace") or text).splitlines() if line.strip()]
    return None, said[-1] if said else f"{words[0]} ended with code {done.returncode}"


LOOKS = {"disk": disk, "gpus": gpus, "devices": devices, "ps": processes}


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


def once(what: str, descriptor: int) -> None:
    """Answer one question, to a descriptor."""
    with os.fdopen(descriptor, "w") as file:
        json.dump(LOOKS[what]({"what": what, "path": ""}), file)


if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # they are for tasks
        signal.signal(number, signal.SIG_IGN)
    if len(sys.argv) == 3:
        once(sys.argv[1], int(sys.argv[2]))
    else:
        main()
