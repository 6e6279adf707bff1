from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from distrun import shipping
from distrun_runtime.contract import session


def test_the_digest_is_that_of_the_bytes_and_the_same_every_time() -> None:
    digest, data = shipping.archive()
    assert digest == hashlib.sha256(data).hexdigest()
    assert shipping.archive() == (digest, data)


def test_times_and_modes_of_the_files_do_not_matter_but_their_text_does(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "distrun_runtime", tmp_path / "b" / "distrun_runtime"
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("X = 1\n")
    os.utime(second / "__init__.py", (1, 1))
    (second / "__init__.py").chmod(0o600)
    assert shipping.archive(first) == shipping.archive(second)
    (second / "__init__.py").write_text("X = 2\n")
    assert shipping.archive(first)[0] != shipping.archive(second)[0]


def test_it_holds_the_sources_and_nothing_else(tmp_path: Path) -> None:
    names = zipfile.ZipFile(io.BytesIO(shipping.archive()[1])).namelist()
    assert names == sorted(names)
    assert "distrun_runtime/contract/plan.py" in names
    assert all(name.startswith("distrun_runtime/") and name.endswith((".py", ".typed", ".c")) for name in names)


def test_it_goes_in_one_frame() -> None:
    digest, data = shipping.archive()
    (frame,) = session.Decoder().feed(session.encode({"type": "runtime", "digest": digest}, data))
    assert frame.body == data


def test_unpacked_elsewhere_the_store_works(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(shipping.archive()[1])) as packed:
        packed.extractall(tmp_path)
    code = (
        "import numpy, zmq, distrun_runtime; from distrun_runtime import kvstore\n"
        "kv = kvstore.create('local'); kv.init(3, numpy.ones(2)); out = numpy.zeros(2); kv.pull(3, out=out)\n"
        "print(distrun_runtime.__file__, out.sum())\n"
    )
    env = {"PYTHONPATH": str(tmp_path), "PATH": os.defpath}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [str(tmp_path / "distrun_runtime" / "__init__.py"), "2.0"], result.stderr
