"""Wheels of numpy and pyzmq for hosts without a network: they bring those of this interpreter, which the hosts see."""

from __future__ import annotations

import base64
import hashlib
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
