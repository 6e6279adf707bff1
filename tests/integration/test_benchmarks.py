"""The benchmark runs, checks what it pulls, and computes the ratios it prints."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from slowness import scaled

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _loops_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of the jobs would load or compile numba's loops, which takes far longer than the rounds here."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_" + Path(name).stem, BENCHMARKS / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("model", "tensors", "megabytes"),
    [("resnet50", 161, 102), ("vgg16", 32, 553), ("one", 1, 67), ("small", 1000, 1), ("many", 100000, 2)],
)
def test_models_have_the_tensors_that_the_page_says(model: str, tensors: int, megabytes: int) -> None:
    shapes = load("peers/shapes.py").MODELS[model]()
    assert len(shapes) == tensors
    assert round(sum(prod(shape) * 4 for shape in shapes) / 1e6) == megabytes


def test_ratios_of_a_round_are_those_of_each_run_and_a_failed_run_says_so() -> None:
    bench = load("round.py")
    columns = [bench.System(name, "python", "", ()) for name in ("distrun", "mxnet", "gloo")]
    found = {
        ("one", "distrun"): [0.030, 0.020, 0.010],
        ("one", "mxnet"): [0.060, 0.200, 0.010],
        ("one", "gloo"): [None, None, None],
        ("many", "distrun"): [0.5, None, 0.7],
    }
    rows = bench.table(columns, ["one", "many"], found).splitlines()
    assert rows[-2] == "| one | 20.0 | 60.0 (0.50, 0.10-1.00) | failed |"
    assert rows[-1] == "| many | 600.0 |  |  |"


TABLE = """\
Before.

| work | distrun | mxnet | gloo |
|---|---|---|---|
| one | 20.0 | 60.0 (0.50, 0.10-1.00) | failed |
| small, a < b | 4.2 |  | 6.0 (0.70, 0.60-0.80) |

After.
"""


def test_a_table_of_times_gets_a_chart_with_a_bar_for_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = load("report.py")
    monkeypatch.setattr(report, "CHARTS", tmp_path / "benchmarks")
    once = report.charted("A round, twice", TABLE)
    assert once == TABLE.replace("0.80) |\n", "0.80) |\n\n![A round, twice](benchmarks/a-round-twice.svg)\n")
    assert report.charted("A round, twice", once) == once
    drawn = ElementTree.parse(tmp_path / "benchmarks" / "a-round-twice.svg").getroot()
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert [text for text in texts if text and text.endswith(" ms")] == ["20 ms", "60 ms", "4.2 ms", "6 ms"]
    widths = [float(each.get("width", "0").rstrip("%")) for each in drawn.iter() if each.tag.endswith("rect")][1:]
    assert sorted(widths) == [widths[2], widths[3], widths[0], widths[1]], "longer times have longer bars"


def test_the_charts_of_the_page_are_those_of_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("report.py")
    page, charts = report.TARGET.read_text("utf-8"), report.CHARTS
    monkeypatch.setattr(report, "TARGET", tmp_path / "benchmarks.md")
    monkeypatch.setattr(report, "CHARTS", tmp_path / "benchmarks")
    report.TARGET.write_text(page, "utf-8")
    report.main()
    assert report.TARGET.read_text("utf-8") == page, "run benchmarks/report.py"
    drawn, shown = ({path.name: path.read_text("utf-8") for path in at.iterdir()} for at in (report.CHARTS, charts))
    assert drawn == shown, "run benchmarks/report.py"


def test_ratios_beside_a_library_are_those_to_its_fastest_variant() -> None:
    table = "| work | distrun | gloo | gloo-bucket | tcp |\n|---|---|---|---|---|\n"
    ratios = load("report.py").ratios_of(table + "| one | 2.0 | 9 (0.22, 0.2-0.3) | 4 (0.50, 0.4-0.6) | 1 (2, 2-2) |\n")
    assert {name: (each.median, each.least, each.most) for name, each in ratios["one"].items()} == {
        "gloo": (0.5, 0.4, 0.6)
    }


def test_other_tables_get_no_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("report.py")
    monkeypatch.setattr(report, "CHARTS", tmp_path / "benchmarks")
    table = "| rule | sum |\n|---|---|\n| sgd | 1.0 |\n"
    assert report.charted("Rules", table) == table
    assert not list(tmp_path.iterdir())


def test_a_round_takes_as_long_as_its_slowest_worker() -> None:
    assert load("round.py").slowest([[1.0, 5.0, 2.0], [4.0, 1.0, 3.0]]) == 4.0


@pytest.mark.slow
def test_rounds_run_on_this_machine_and_the_peers_that_are_missing_are_named(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "round.py"), "--works", "small", "small by key", "small by priority"]
    command += ["--systems", "distrun", "--peers", str(tmp_path), "--runs", "1", "--rounds", "1"]
    command += ["-n", "2", "-s", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(200), check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "| work | distrun |"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["small", "small by key", "small by priority"]
    assert "failed" not in result.stdout
    assert "mxnet is left out" in result.stderr
    assert "scripts/install peers" in result.stderr


@pytest.mark.slow
def test_a_rule_is_measured_beside_the_sum_and_a_copy() -> None:
    command = [sys.executable, str(BENCHMARKS / "rules.py"), "--model", "small", "--repeats", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| rule | sum and rule | sum alone | copy |")
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(load("rules.py").RULES)


def test_what_a_rule_adds_is_its_time_without_that_of_the_sum() -> None:
    bench = load("rules.py")
    times = bench.Times([0.030, 0.050, 0.040], [0.010, 0.010, 0.010], [0.010, 0.010, 0.020])
    assert bench.table({"sgd": times}).splitlines()[-1] == (
        "| sgd | 40.0 | 10.0 | 10.0 | 2.00 (1.50-4.00) | 3.00 (2.00-5.00) |"
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU time and memory of a job are read from /proc")
def test_growth_is_measured_for_all_processes_of_a_job() -> None:
    command = [sys.executable, str(BENCHMARKS / "growth.py"), "--runs", "1", "--smallest", "--series", "servers"]
    result = subprocess.run(
        [*command, "--memory", "small"], capture_output=True, text=True, timeout=scaled(200), check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:4]] == ["1", "2"]
    assert all(float(line.split("|")[6]) >= 0 for line in lines[2:4])  # less than a tick of the clock is none
    assert lines[6] == "| parameters | 1 | 1.00 |"
    assert float(lines[7].split("|")[2]) < float(lines[8].split("|")[2])  # what both servers took before and at most
    assert "failed" not in result.stdout


def test_growth_is_the_cost_of_a_key_divided_by_the_least_above_it() -> None:
    bench = load("growth.py")
    cases = [bench.Case(keys=count) for count in (1, 10, 100, 1000)]
    found = {cases[0]: [8.0], cases[1]: [2.0, 1.0, 4.0], cases[2]: [3.0]}
    rows = bench.table({"keys": cases}, found).splitlines()[2:]
    assert [row.split("|")[6:9] for row in rows] == [
        [" 8.0 ", " 8.0-8.0 ", "  "],
        [" 2.0 ", " 1.0-4.0 ", " 0.25 "],
        [" 3.0 ", " 3.0-3.0 ", " 1.50 "],
        [" failed ", "  ", "  "],
    ]


def test_the_ratio_of_a_launch_is_ours_divided_by_the_fastest_of_the_others() -> None:
    bench = load("launch.py")
    columns = [bench.System(name, (), "") for name in ("distrun", "loop", "mpirun")]
    found = {
        (16, "distrun"): [bench.Run(start, 0.1, 0.8, 40_000_000, 0, 0.9) for start in (0.7, 0.8, 3.0)],
        (16, "loop"): [bench.Run(1.0, 0.9, 2.4, 0, 0, 1.1)],
        (16, "mpirun"): [bench.Run(1.6, 0.9, 2.4, 0, 0, 1.1)],
        (1, "distrun"): [bench.Run(0.3, 0.1, 0.2, 34_000_000, 0, 0.4)],
    }
    rows = bench.times(columns, [1, 16], found, "start_s").splitlines()
    assert rows[0] == "| hosts | distrun | loop | mpirun | ratio |"
    assert rows[2:] == ["| 1 | 0.30 | failed | failed |  |", "| 16 | 0.80 | 1.00 | 1.60 | 0.80 |"]
    assert bench.costs(columns, [1, 16], found).splitlines()[-1] == "| 16 | 50 | 40 | 0.40 | 50 | 150 | 150 |"


@pytest.mark.lab
def test_a_launch_is_measured_on_hosts_beside_the_ssh_program() -> None:
    command = [sys.executable, str(BENCHMARKS / "launch.py"), "--hosts", "2", "--runs", "1", "--local-runs", "1"]
    command += ["--systems", "distrun", "ssh loop"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    if "lab needs" in result.stderr or "no lab can be made" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| hosts |") == 4
    assert re.search(r"^local: first line \d+ ms, end \d+ ms, bare python3 \d+ ms, ratio ", result.stdout, re.MULTILINE)
    assert "failed" not in result.stdout


@pytest.mark.slow
def test_pulls_of_rows_are_measured_beside_a_dense_pull_of_the_same_run() -> None:
    command = [sys.executable, str(BENCHMARKS / "rows.py"), "--runs", "1", "--rounds", "2", "--rows", "2000"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^\| dense \| [0-9.]+ \|$", result.stdout, re.MULTILINE)
    for kind in ("array", "array, shuffled", "RowSparse", "RowSparse, shuffled"):
        ratio = r"^\| %s \| [0-9.]+ \(([0-9.]+), \1-\1\) \|$" % kind
        assert re.search(ratio, result.stdout, re.MULTILINE), result.stdout


@pytest.mark.slow
def test_object_stores_are_measured_beside_files() -> None:
    pytest.importorskip("aiohttp", reason="web servers are read by aiohttp: pip install aiohttp fsspec")
    command = [sys.executable, str(BENCHMARKS / "remote.py"), "--runs", "1", "--megabytes", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert result.returncode == 0, result.stderr
    for work in ("records in order", "records shuffled", "images"):
        cell = r" \d+ \(([0-9.]+), {0}-{0}\) \|"
        row = r"^\| %s \| \d+ \|%s$" % (work, "".join(map(cell.format, (r"\1", r"\2", r"\3"))))
        assert re.search(row, result.stdout, re.MULTILINE), result.stdout


@pytest.mark.slow
def test_float16_is_measured_beside_numpys_casts_and_beside_no_compression() -> None:
    command = [sys.executable, str(BENCHMARKS / "halves.py"), "--runs", "1", "--rounds", "1", "--magnitudes", "1e-6"]
    command += ["--model", "10x1000", "-n", "1", "-s", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "| magnitude | numpy to float16 | to float16 | numpy to float32 | to float32 |"
    assert [line.split()[1] for line in lines[2:6]] == ["1", "0.001", "0.0001", "1e-06"]
    assert lines[6] == "| magnitude | none | fp16 |"
    assert lines[8].startswith("| 1e-06 |")
    assert "failed" not in result.stdout


def test_the_ratios_of_float16_are_ours_divided_by_numpys_and_fp16_divided_by_none() -> None:
    bench = load("halves.py")
    casts = {(1.0, "numpy to float16"): 0.004, (1.0, "to float16"): 0.001}
    casts.update({(1.0, "numpy to float32"): 0.002, (1.0, "to float32"): 0.003})
    assert bench.cast_table(casts).splitlines()[-1] == "| 1 | 4.00 | 1.00 (0.25) | 2.00 | 3.00 (1.50) |"
    rounds = {(1.0, "none"): 0.2, (1.0, "fp16"): 0.1, (1e-6, "none"): 0.2}
    assert bench.round_table([1.0, 1e-6], rounds).splitlines()[2:] == [
        "| 1 | 200.0 | 100.0 (0.50) |",
        "| 1e-06 | 200.0 | failed |",
    ]


@pytest.fixture
def latency(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return benchmarks/latency.py, which imports other files there."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return load("latency.py")


def test_a_small_round_is_compared_run_by_run_and_each_goal_says_whether_it_is_reached(latency: ModuleType) -> None:
    works = [each for each in latency.WORKS if each.name in ("4 B", "4 B, one worker", "barrier")]
    found = {
        "4 B": {"distrun": [0.0002, 0.0003, 0.0005], "gloo": [0.0004, 0.0002, None], "mxnet": [None, None, None]},
        "4 B, one worker": {"distrun": [0.0021]},
        "barrier": {"distrun": [0.001]},
    }
    rows = latency.table(["distrun", "gloo", "mxnet"], found, works).splitlines()
    assert rows[0] == "| work | distrun | gloo | mxnet | goal |"
    assert rows[2:] == [
        "| 4 B | 0.300 | 0.300 (1.00, 0.50-1.50) | failed | at most 0.3 ms: reached; at most 1.00 of gloo: reached |",
        "| 4 B, one worker | 2.10 |  |  |  |",
        "| barrier | 1.00 |  |  | at most 0.3 ms: missed |",
    ]
    there = latency.table(["distrun", "gloo"], found, [latency.between_hosts(each) for each in works]).splitlines()
    assert [row.split("|")[-2].strip() for row in there[2:]] == ["at most 1.00 of gloo: reached", "", ""]


def test_small_rounds_of_one_job_are_measured_by_one_launch(latency: ModuleType) -> None:
    works = {each.name: each for each in latency.WORKS}
    ours = latency.System("distrun", "python", ("latency_round.py", "distrun"), serves=True)
    gloo = latency.System("gloo", "python", ("latency_round.py", "gloo"))
    sketch = latency.System("sketch", "python", ("small_round.py", "unix"), ranks=0, codes="[0-9]+")
    assert ours.job(works["4 MB"]) != ours.job(works["4 MB, -s 2"])
    assert gloo.job(works["4 MB"]) == gloo.job(works["4 MB, -s 2"]) == (2, 0)
    assert [gloo.takes_part(works[name]) for name in ("4 B", "4 B, one worker", "barrier")] == [True, False, True]
    assert [sketch.takes_part(works[name]) for name in ("4 B", "4 B, one worker", "barrier")] == [True, False, False]
    both = [works["4 MB"], works["4 MB, -s 2"]]
    command = latency.command_of(gloo, (2, 0), both, "h1,h2")
    assert command[-4:] == ["python", "latency_round.py", "gloo", "4194304=40"]
    assert latency.command_of(sketch, (2, 0), both, "")[0] == "python"


@pytest.mark.parametrize("on_hosts", [False, True])
def test_the_page_shows_the_newest_results_of_small_rounds(latency: ModuleType, on_hosts: bool) -> None:
    report = load("report.py")
    heading, body = latency.section(json.loads(latency.newest(on_hosts).read_text()))
    written = report.TARGET.read_text().partition("## %s\n\n" % heading)[2].partition("\n## ")[0]
    assert re.sub(r"\n!\[.*\n", "", written).strip() == body.strip()


@pytest.mark.slow
def test_small_rounds_are_measured_beside_the_least_that_they_cost(tmp_path: Path) -> None:
    works = ("4 B", "1 MB", "4 B, one worker", "barrier", "1,000 keys, wait=False", "ResNet-50, key by key")
    kept = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "latency.py"), "--runs", "1", "--peers", str(tmp_path / "none")]
    command += ["--results", str(kept), "--works", *works]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    names = ["distrun", "pyzmq", "sketch-tcp", "sketch", "sketch-threads"]
    assert lines[0] == "| work | %s | goal |" % " | ".join(names)
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(works)
    assert "gloo is left out" in result.stderr
    assert "scripts/install peers" in result.stderr
    found = json.loads(kept.read_text())["seconds"]
    assert list(found["1 MB"]) == names
    assert list(found["barrier"]) == ["distrun"]
    assert list(found["ResNet-50, key by key"]) == ["distrun", "sketch"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="threads of a job are read from /proc")
def test_where_the_time_of_a_small_round_goes_is_shown_for_both_sides() -> None:
    command = [sys.executable, str(BENCHMARKS / "latency.py"), "--where", "--rounds", "20", "--functions", "400"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^\| (?:server|worker) \d+ \| main \| \d+ \|", result.stdout, re.MULTILINE)) == 3
    assert re.search(r"^A round of rank 0: [0-9.]+ ms\.$", result.stdout, re.MULTILINE)
    assert re.search(r"^\| worker \| MainThread \| \d+ \| \d+ \|", result.stdout, re.MULTILINE)
    worker, server = result.stdout.partition("| server: function |")[::2]
    assert re.search(r"^\| `distrun_runtime/kvstore.py:\d+ KVStore.pushpull` \| 1.0 \|", worker, re.MULTILINE)
    assert re.search(r"^\| `ps/steady.py:\d+ Steady.take_bytes` \|", server, re.MULTILINE)


def test_a_process_that_strace_cannot_follow_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    lines = [{"who": "worker", "calls": [["read", 30], ["futex", 7], ["brk", 0]]}, {"who": "server", "why": "no right"}]
    assert load("latency_where.py").system_calls_table(lines, 10).splitlines()[2:] == [
        "| worker | 3.7 | read 3.0, futex 0.7 |",
        "| server |  | strace cannot follow it: no right |",
    ]


@pytest.mark.lab
def test_small_rounds_are_measured_between_two_hosts_of_a_lab(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "latency.py"), "--hosts", "lab", "--runs", "1", "--works", "4 B"]
    command += ["--systems", "distrun", "pyzmq", "sketch-tcp", "--peers", str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    if "lab needs" in result.stderr or "no lab can be made" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"^\| 4 B \| [0-9.]+ \| [0-9.]+ \(.*\) \| [0-9.]+ \(.*\) \| at most 1.00 of gloo \|$", result.stdout, re.M
    )


RECORDED = """
import calls
recorder = calls.Recorder()
def inner():
    return len("abc")
def outer():
    inner()
    inner()
outer()
recorder.is_on = True
outer()
recorder.print_report("worker")
"""


def test_a_recorder_counts_the_calls_between_its_start_and_its_report() -> None:
    env = {"PYTHONPATH": str(BENCHMARKS / "peers")}
    result = subprocess.run([sys.executable, "-c", RECORDED], capture_output=True, text=True, env=env, check=True)
    line = json.loads(result.stdout)
    counts = {name.split()[-1]: (is_python, count) for name, is_python, count, *_ in line["functions"]}
    assert counts["inner"] == (True, 2)
    assert counts["outer"] == (True, 1)
    assert counts["builtins.len"] == (False, 2)
    own_ns, whole_ns = ({name.split()[-1]: row[at] for name, *row in line["functions"]} for at in (2, 3))
    assert whole_ns["inner"] == own_ns["inner"] + own_ns["builtins.len"]
    assert whole_ns["outer"] == own_ns["outer"] + whole_ns["inner"]


def test_a_section_of_the_page_is_replaced_and_the_others_stay() -> None:
    page = load("report.py")
    first = page.with_section("", "One", "old\n")
    both = page.with_section(first, "Two", "2")
    assert page.with_section(both, "One", "new") == page.TITLE + "\n## One\n\nnew\n\n## Two\n\n2\n"
    written = page.TARGET.read_text()
    heading = load("round.py").HEADING
    body = written.partition("## %s\n\n" % heading)[2].partition("\n## ")[0]
    assert page.with_section(written, heading, body) == written
