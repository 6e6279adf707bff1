"""The documents: links lead somewhere, shown commands parse, shown Python runs, generated pages are fresh."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from namedtests import check_named_tests
from slowness import scaled

from distrun import cli
from distrun_runtime import kvstore
from distrun_runtime.arrays.dtypes import BFLOAT16
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops import optimizers as rules

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUBCOMMANDS = tuple(cli.COMMANDS)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text("utf-8")) if language in languages]


def in_code(name: str, page: Path) -> bool:
    """Tell whether a name stands in code marks on a page."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(BLOCK, "", page.read_text("utf-8")))
    return any(re.search(r"(?<![\w-])%s(?![\w-])" % re.escape(name), span) for span in spans)


def anchors(page: Path) -> set[str]:
    """Return what headings can be linked to, as GitHub forms it."""
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def shown_commands() -> list[str]:
    """Return every line of the pages' shell blocks, and of the scripts, that runs distrun."""
    text = "\n".join(block for page in PAGES for block in blocks(page, "sh", "bash", "console"))
    text += "\n" + (ROOT / "scripts" / "demo").read_text("utf-8").replace("set -- ", "")
    lines = [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("distrun ")})


def test_there_are_pages_and_commands_to_check() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "overview.md", "environment.md"} <= {p.name for p in PAGES}
    assert len(shown_commands()) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), "%s links to %s" % (page.name, target)
        is_picture = file.suffix == ".png" and anchor in ("only-light", "only-dark")  # by these the theme chooses
        assert not anchor or is_picture or anchor in anchors(file), "%s links to %s" % (page.name, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_named_in_code_marks_exists(page: Path) -> None:
    """`docs/...`, `scripts/...` and the like: a moved file must be moved in the documents too."""
    roots = ("distrun/", "runtime/", "docs/", "scripts/", "examples/", "benchmarks/", "tests/")
    for name in re.findall(r"`([\w./-]+)`", page.read_text("utf-8")):
        if name.startswith(roots) and "NAME" not in name:
            places = [ROOT / name, ROOT / (name + ".py")]
            assert any(place.exists() for place in places), "%s names %s" % (page.name, name)


@pytest.fixture
def printed_by(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `distrun WORDS` in this process and returns what it prints. It has to do no more than that."""

    def run(*words: str) -> str:
        code = cli.run(words)
        out, err = capfd.readouterr()
        assert code == 0, "%s\n%s" % (shlex.join(words), err)
        return out

    return run


def test_every_shown_command_parses(printed_by: Callable[..., str]) -> None:
    whole = dict.fromkeys(("launch", "rerun"), "--help-all")
    helps = {subcommand: printed_by(subcommand, whole.get(subcommand, "--help")) for subcommand in SUBCOMMANDS}
    for line in shown_commands():
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index("|")] if "|" in words else words  # what reads its output has options of its own
        if words[0].startswith("-"):
            continue
        subcommand, rest = words[0], words[1:]
        assert subcommand in helps, line
        if subcommand in ("launch", "exec"):
            rest = before_the_command(rest, helps[subcommand])
        for word in rest:
            if word.startswith("-"):
                assert re.search(r"(?<![\w-])%s(?![\w-])" % re.escape(word.partition("=")[0]), helps[subcommand]), (
                    "%r shows %s, which `distrun %s --help` does not" % (line, word, subcommand)
                )


def before_the_command(words: list[str], help_text: str) -> list[str]:
    """Return distrun's own options: up to the first word that is neither an option nor an option's value."""
    own: list[str] = []
    while words and words[0].startswith("-"):
        own.append(words[0])
        # An option that takes a value is followed by its name in capitals, or by its choices.
        takes = re.search(r"(?<![\w-])%s(?:, --?[\w-]+)* +(\[|<|[A-Z])" % re.escape(words[0]), help_text)
        words = words[2:] if takes and "=" not in words[0] else words[1:]
    assert words or "-f" in own, "no command left"
    return own


def test_dry_run_takes_the_shown_launch_commands(
    tmp_path: Path, printed_by: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser itself is the better judge; nothing is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("d1 slots=4\nd2 slots=4\n")
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "hf-token").write_text("s3cret\n")
    page = (ROOT / "docs" / "job-file.md").read_text("utf-8")
    (tmp_path / "job.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    for line in shown_commands():
        words = shlex.split(line, comments=True)
        if words[1] == "launch" and "$@" not in line:
            assert printed_by("launch", "--dry-run", *words[2:])


def names_of_tests() -> set[str]:
    """Return the names of all tests, without their parameters."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)}


def test_every_row_of_the_page_about_failures_names_a_test_and_each_exists() -> None:
    rows = re.findall(r"^\| .* \|$", (ROOT / "docs" / "failures.md").read_text("utf-8"), re.MULTILINE)
    cases = [row for row in rows if row.count(" | ") == 4 and not row.endswith("| Test |")]
    assert len(cases) > 40
    exist = names_of_tests()
    for case in cases:
        names = re.findall(r"`(test_\w+)`", case.rpartition(" | ")[2])
        assert names, case
        assert set(names) <= exist, set(names) - exist


def test_every_promise_of_the_five_pages_has_a_test_that_exists_or_a_reason() -> None:
    text = (ROOT / "docs" / "seeds.md").read_text("utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Run MXNet on Multiple CPU/GPUs with Data Parallelism",
        "Distributed Training in MXNet",
        "Distributed Training using Gluon",
        "Training with Multiple GPUs Using Model Parallelism",
        "Distributed Training",
    ]
    rows = [line.split(" | ") for line in re.findall(r"^\| (?!Section ).* \|$", text, re.MULTILINE)]
    assert 100 < len(rows) <= 120
    assert {len(row) for row in rows} == {3}
    tested = [row for row in rows if check_named_tests(row[2])]
    assert len(tested) > 100
    for row in rows:
        reason = re.sub(r"`tests/[^`]*`|<br>|\|", "", row[2])
        assert row in tested or len(reason.split()) >= 3, "neither a test nor a reason: %s" % row[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block, str(page))


def run_python(text: str) -> str:
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def launch_two(tmp_path: Path, text: str) -> list[str]:
    """Return what each of two workers prints that run this program, whose store is made a dist_sync one."""
    script = tmp_path / "program.py"
    script.write_text(text.replace('create("local")', 'create("dist_sync")'), "utf-8")
    command = [sys.executable, "-m", "distrun", "launch", "-q", "-n", "2", "-s", "1", "--launcher", "local"]
    command += ["--no-prefix", "--run-dir", str(tmp_path / "jobs"), sys.executable, str(script)]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_python_of_the_readme_runs_and_says_what_it_promises(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(ROOT / "README.md", "python") if "kvstore" in block)
    assert run_python(block) == "0 1 0.8\n"
    assert sorted(launch_two(tmp_path, block)) == ["0 2 0.6", "1 2 0.6"]


@pytest.mark.parametrize("page", ["kvstore.md", "sparse.md", "compression.md", "data.md"])
def test_python_of_a_reference_page_is_one_program_that_prints_what_it_says(page: str) -> None:
    program = "\n".join(blocks(ROOT / "docs" / page, "python"))
    assert run_python(program).splitlines() == re.findall(r"# prints (.*)$", program, re.MULTILINE)


def test_uneven_data_of_the_store_page_ends_alike_on_two_workers(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "kvstore.md", "python") if ".join()" in block)
    head = "import numpy as np\nfrom distrun_runtime import kvstore\n"
    assert launch_two(tmp_path, head + block) == ["[0.5 0.5 0.5 0.5]"] * 2


def test_python_of_the_states_page_puts_weights_together_that_several_servers_saved(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs" / "states.md", "python")
    names: dict[str, Any] = {}
    exec(block, names)
    value = np.arange(15, dtype=np.float32).reshape(5, 3)
    halves = value.view(np.uint16)[:, 1::2].copy()  # the upper ones, on a little-endian machine

    def script(kv: KVStore) -> None:
        kv.init(["w", "half"], [value, halves.view(BFLOAT16)])
        kv.save_states(tmp_path / "states")

    with Cluster(2, servers=3, over="inproc", bigarray_bound=4, partition="mxnet") as job:
        job.run(script)
    assert np.array_equal(names["weights"](str(tmp_path / "states"), "w"), value)
    assert np.array_equal(names["weights"](str(tmp_path / "states"), "half"), halves)


def test_store_page_has_every_call_rule_and_parameter() -> None:
    # What a maker of stores calls, and what a trainer does.
    others = ("register", "joins_by", "skip_round", "check_push", "companion", "give_up", "agree", "reserve", "label")
    others += ("exchange", "needs_all")
    calls = [name for name in dir(KVStore) if name.islower() and not name.startswith("_") and name not in others]
    parameters = {param.name for rule in rules.RULES.values() for param in rule.table or ()}
    for name in [*calls, *kvstore.TYPES, *rules.RULES, *parameters]:
        assert in_code(name, ROOT / "docs" / "kvstore.md"), name


OLD_NAMES = """
mx.kv.create mx.kvstore.create local device dist dist_sync dist_async dist_sync_device dist_device_sync
dist_async_device dist_device_async local_update_cpu local_allreduce_cpu local_allreduce_device nccl p3 horovod byteps
teststore init push pull pushpull broadcast row_sparse_pull set_optimizer _set_updater set_updater
set_gradient_compression save_optimizer_states load_optimizer_states _barrier _send_command_to_servers rank
num_workers type is_capable num_dead_node set_barrier_before_exit MXInitPSEnv MXKVStoreGetNumDeadNode KVStoreServer
profiler KVStoreBase.register waitall NDArray local_rank MXNetError AssertionError UserWarning set_learning_rate
Signum DCASGD SGLD Adamax Nadam AdaDelta FTML ccSGD LBSGD GroupAdaGrad AdaBelief LANS
lr_scheduler lr_mult wd_mult optimizer.Optimizer multi_precision gluon.Trainer collect_params compression_params
update_on_kvstore step allreduce_grads update ignore_stale_grad save_states load_states row_sparse_data
row_sparse_array FactorScheduler module.Module model.FeedForward.create epoch_size context mx.gpu mx.cpu
work_load_list split_data split_and_load SplitSampler DataLoader num_parts part_index io.MNISTIter io.ImageRecordIter
io.ResizeIter io.NDArrayIter recordio _split_input_slice symbol autograd gluon.loss group2ctx AttrScope
BucketSentenceIter train_mnist.py image_classification.py cifar10_dist.py --network --kv-store --kvstore --gpus
--dataset --model --epochs launch.py dmlc_local.py -n -s -H -h --launcher --sync-dst-dir --env --env-server
--env-worker --p3 pkill mpi sge yarn DMLC_ROLE DMLC_NUM_WORKER DMLC_NUM_SERVER DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT
DMLC_NODE_HOST DMLC_INTERFACE DMLC_RANK DMLC_WORKER_ID DMLC_SERVER_ID DMLC_TASK_ID DMLC_LOCAL DMLC_USE_KUBERNETES
DMLC_PS_VAN_TYPE DMLC_PS_WATER_MARK DMLC_LOG_STACK_TRACE_DEPTH DMLC_JOB_CLUSTER DMLC_SUBMIT_CLUSTER DMLC_NUM_ATTEMPT
DMLC_TRACKER_URI DMLC_TRACKER_PORT PORT PS_VERBOSE PS_RESEND PS_RESEND_TIMEOUT PS_DROP_MSG PS_HEARTBEAT_INTERVAL
PS_HEARTBEAT_TIMEOUT MXNET_KVSTORE_BIGARRAY_BOUND MXNET_KVSTORE_REDUCTION_NTHREADS MXNET_KVSTORE_SERIAL_PUSH
MXNET_KVSTORE_USETREE MXNET_KVSTORE_LOGTREE MXNET_KVSTORE_TREE_ARRAY_BOUND MXNET_KVSTORE_TREE_BACKTRACK
MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY MXNET_KVSTORE_SLICE_THRESHOLD MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE
MXNET_UPDATE_ON_KVSTORE MXNET_ENABLE_GPU_P2P MXNET_UPDATE_AGGREGATION_SIZE
"""
"""What a user of MXNet's distributed training has typed, read or set: of its manual, its pages and its C interface."""


def test_the_page_for_users_of_mxnet_has_every_old_name() -> None:
    page = ROOT / "docs" / "from-mxnet.md"
    assert [name for name in OLD_NAMES.split() if not in_code(name, page)] == []


@pytest.mark.parametrize("script", ["render-environment", "render-help", "render-options"])
def test_a_page_is_what_its_table_says(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_screens_of_the_pages_are_those_that_their_script_makes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "screens"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(500), check=False)
    assert result.returncode == 0, result.stderr
    kept = {path.name for path in (ROOT / "docs" / "screens").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {name for name in kept if not name.endswith(".png")}


def test_hosts_example_has_every_attribute_and_says_who_reads_it() -> None:
    text = (ROOT / "hosts.example").read_text("utf-8")
    keys = ["slots", "max_slots", "port", "user", "addr", "iface", "gpus", "role", "labels", "python", "workdir"]
    keys += ["identity", "jump"]
    for key in keys:
        assert re.search(r"^[^#\n]*\s%s=" % key, text, re.MULTILINE), key
    for form in ("@include ", "[2001:", "[01-16,20]", "ubuntu@", ":2222", '"', "//"):
        assert form in text, form
    assert "ssh backend" in text.partition("d1")[0]


def test_readme_commands_exist_and_can_be_executed() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for script in ("scripts/demo", "scripts/test"):
        assert script in readme
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]:
        assert path.stat().st_mode & 0o111, "%s is not executable" % path
    assert "scripts/test --all" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_glossary_has_every_role_and_the_binding_words() -> None:
    overview = (ROOT / "docs" / "overview.md").read_text("utf-8")
    for word in ("job", "task", "role", "worker", "server", "scheduler", "slot", "shard", "plan", "agent", "round"):
        assert "\n| %s |" % word in overview, word


def test_the_backend_that_is_shown_is_the_example() -> None:
    example = ROOT / "examples" / "backend_tsp" / "distrun_tsp.py"
    text = example.read_text("utf-8")
    assert text in blocks(ROOT / "docs" / "backends.md", "python")
    assert len(text.splitlines()) <= 80
