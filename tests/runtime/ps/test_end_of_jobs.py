"""What a worker's clean end does with calls that nobody waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store

from distrun_runtime.errors import KVError
from distrun_runtime.ps.session import NodeSession


def test_errors_of_pushes_of_all_stores_are_said_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    def script(session: NodeSession) -> Any:
        for key in ("a", "b"):
            kv = open_store("dist_async", session)
            kv.init(key, np.zeros(4, np.float32))
            kv.push(key, np.ones(4, np.float32), wait=False)
        return session.end()

    with Cluster(1, 1, over="inproc") as cluster:
        [error] = cluster.run_sessions(script)
    assert isinstance(error, KVError)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distrun: error: at exit: ")]
    assert ["push of key 'a'" in line for line in said] == [True, False]
    assert "push of key 'b'" in said[1]


def test_an_error_that_was_waited_for_is_no_error_at_the_end() -> None:
    def script(session: NodeSession) -> Any:
        kv = open_store("dist_async", session)
        kv.init("a", np.zeros(4, np.float32))
        pending = kv.push("a", np.ones(4, np.float32), wait=False)
        with pytest.raises(KVError, match="dist_async needs a rule"):
            pending.wait()
        return session.end()

    with Cluster(1, 1, over="inproc") as cluster:
        assert cluster.run_sessions(script) == [None]
