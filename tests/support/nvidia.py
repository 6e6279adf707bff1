"""Stand-ins for what NVIDIA's driver brings along: its library, in C, and the program `nvidia-smi`, a shell script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LIBRARY = r"""
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned gpu, memory; } use;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
/* A GPU's handle is 100 + its number, that of an instance 1000 + 10 times the GPU's number + its own. */
int nvmlInit_v2(void) { if (number("NVML_HANGS")) sleep(600); return number("NVML_INIT"); }
const char *nvmlErrorString(int code) { return code == 18 ? "RM has detected an NVML/RM version mismatch." : "Other"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "550.54.15"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("NVML_GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, void **gpu) {
    if (getenv("NVML_FORBIDDEN") && (int)at == number("NVML_FORBIDDEN")) return 4;
    *gpu = (void *)(100ul + at); return 0;
}
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
    long at = (long)gpu;
    if (at >= 1000) snprintf(text, size, "MIG-%04ld", at - 1000); else snprintf(text, size, "GPU-%04ld", at - 100);
    return 0;
}
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) { snprintf(text, size, "NVIDIA A100"); return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, memory *found) {
    found->total = 40ull << 30; found->used = 1ull << 30; found->free = 39ull << 30; return 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, use *found) { found->gpu = 37; found->memory = 5; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, process *found) {
    if (*count < 2) return 7;
    memset(found, 0xff, 2 * sizeof *found);
    found[0].pid = 7; found[0].used = 123; found[1].pid = 4000000000u; found[1].used = ~0ull;
    *count = 2; return 0;
}
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *later) {
    if (!getenv("NVML_MIG")) return 3;
    *now = *later = (long)gpu - 100 == number("NVML_MIG"); return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned at, void **found) {
    if (at % 2) return 6;
    *found = (void *)(1000 + 10 * ((long)gpu - 100) + at); return 0;
}
"""

SMI = """\
#!/bin/sh
[ -z "$SMI_SAYS" ] || { echo "$SMI_SAYS"; exit 9; }
at=0
while [ $at -lt ${SMI_GPUS:-4} ]; do
    case $1 in
    --query-gpu=uuid,index,driver_version,memory.total,name) echo "GPU-000$at, $at, 550.54, 81559, NVIDIA H100, 80GB" ;;
    -L)
        echo "GPU $at: NVIDIA H100, 80GB (UUID: GPU-000$at)"
        [ "$at" != "$SMI_MIG" ] || echo "  MIG 1g.5gb     Device  0: (UUID: MIG-000$at)" ;;
    esac
    at=$((at + 1))
done
"""


def library(folder: Path) -> Path:
    """Make the library in a folder, which LD_LIBRARY_PATH is to name; skip the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a stand-in of NVIDIA's library")
    made = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(made)], input=LIBRARY.encode(), check=True
    )
    return made


def smi(folder: Path) -> Path:
    """Make the program in a folder, which PATH is to name. SMI_GPUS says how many there are, SMI_SAYS why it fails."""
    made = folder / "nvidia-smi"
    made.write_text(SMI)
    made.chmod(0o755)
    return made
