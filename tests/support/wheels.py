"""Wheels of numpy and pyzmq for hosts without a network: they bring those of this interpreter, which the hosts see."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sysconfig
import zipfile
from pathlib import Path

SITE = sysconfig.get_paths()["purelib"]


def make(folder: Path, *names: str, path: str = SITE) -> None:
    """Write a wheel of each name (numpy and pyzmq without any) into `folder`: a .pth file that names `path`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("numpy", "pyzmq"):
        stem = "%s-99.0" % name
        info = "%s.dist-info" % stem
        files = {
            "%s_here.pth" % name: path + "\n",
            "%s/METADATA" % info: "Metadata-Version: 2.1\nName: %s\nVersion: 99.0\n" % name,
            "%s/WHEEL" % info: "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        rows = ["%s,sha256=%s,%d" % (file, _digest(text), len(text)) for file, text in files.items()]
        files["%s/RECORD" % info] = "\n".join([*rows, "%s/RECORD,," % info]) + "\n"
        with zipfile.ZipFile(folder / ("%s-py3-none-any.whl" % stem), "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def make_distrun(folder: Path, root: Path) -> Path:
    """Write distrun's own wheel from a checkout, as its build does, without a build backend; return its path."""
    info = "distrun-99.0.dist-info"
    needs = [f"Requires-Dist: {one}" for one in importlib.metadata.requires("distrun") or [] if "extra ==" not in one]
    files = {
        "METADATA": "\n".join(["Metadata-Version: 2.1", "Name: distrun", "Version: 99.0", *needs, ""]),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "[console_scripts]\ndistrun = distrun.__main__:main\n",
        "RECORD": "",
    }
    sources = {"distrun": "distrun", "runtime/distrun_runtime": "distrun_runtime", "templates": "distrun/templates"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "distrun-99.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{info}/{name}", text)
        for source, target in sources.items():
            for file in (root / source).rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    wheel.write(file, Path(target) / file.relative_to(root / source))
    return path
