"""docs/conformance.md: every test that it names exists, no row is without one, and no part of the job without a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from namedtests import NAMED, check_named_tests, parameters

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "conformance.md").read_text("utf-8")
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("|")
    and not line.startswith(("|---", "| Test there", "| Case |", "| There |", "| Kept |", "| | Promise"))
]
UPSTREAM = set(
    """
    default_cpu check_row_sparse_keys check_row_sparse_keys_with_zeros check_big_row_sparse_keys init_gpu
    compressed_cpu_1bit compressed_cpu_2bit invalid_cpu gluon_type_cpu gluon_step_cpu gluon_sparse_step_cpu
    dist_async_kvstore.py test_sync_init test_sync_push_pull test_gluon_trainer_type dist_device_sync_kvstore_custom.py
    dist_device_sync_kvstore_byteps.py dist_device_sync_kvstore_horovod.py test_compress_kvstore test_group_kvstore
    test_server_profiling.py test_single_kv_pair test_row_sparse_pull test_init test_pull test_list_kv_pair
    test_aggregator test_sparse_aggregator test_updater test_get_type test_invalid_pull test_kvstore_custom.py
    test_kvstore_gpu.py test_gluon_trainer.py test_connection test_simple_app test_kv_app test_kv_app_multi_workers
    test_kv_app_benchmark BytePS
""".split()  # noqa: SIM905  # as a list it takes forty lines
)


def test_there_are_rows_to_check() -> None:
    assert len(ROWS) > 100
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60] or "promise")
def test_every_row_names_tests_that_exist(row: str) -> None:
    *_, said, cell, _ = row.split("|")
    assert said.strip()
    assert check_named_tests(cell), "no test stands in this row"


def test_no_test_of_the_original_is_left_out() -> None:
    words = set(re.findall(r"[\w.]+", " ".join(row.split("|")[1] for row in ROWS)))
    missing = UPSTREAM - words
    assert not missing, missing


def test_promises_are_those_about_the_store() -> None:
    promised = [row.split("|")[1].strip() for row in ROWS if re.match(r"\| P\d+ \|", row)]
    assert promised == ["P%d" % number for number in (*range(1, 16), *range(20, 24))]


def test_every_part_of_the_job_stands_in_a_row() -> None:
    job = "tests/integration/test_conformance.py"
    scripts = ROOT / "tests" / "integration" / "conformance"
    parts = {
        str(key.value)
        for script in scripts.glob("*.py")
        for node in ast.parse(script.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and [one.id for one in node.targets if isinstance(one, ast.Name)] == ["PARTS"]
    }
    exact = "test_seven_workers_and_seven_servers_are_exact"
    assert parts == parameters(job, exact) - {"part", "300"}
    assert parts == {part for path, name, part in NAMED.findall(PAGE) if (path, name) == (job, exact)}
