"""The examples, each alone and as a job of two workers and two servers: they learn, and say what they promise.

Those with torch run by the interpreter of `.peers/torch`, which `scripts/install peers` makes; the others by our own.
"""

from __future__ import annotations

import ast
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[2]
EPOCH = re.compile(r"Epoch (\d+): (?:Test_acc|loss) (\d+\.\d{6})$", re.MULTILINE)
TORCH = ("train_mnist", "image_classification", "cifar10_dist", "cifar10_gluon")
EXAMPLES = (*TORCH, "linear_async", "sparse_embedding", "digits")

# Small enough for a second or two each, large enough to learn what is asserted.
CIFAR = ("--width", "4", "--train-size", "512")


def interpreter(example: str) -> str:
    return python_of("torch") if example in TORCH else sys.executable


def run(argv: list[str], folder: Path, code: int = 0) -> tuple[str, str]:
    """Run a command with a job store of its own; return what it says on stdout and on stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "DISTRUN_"))}
    env |= {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT / "runtime"), "OMP_NUM_THREADS": "1"}
    env["OPENBLAS_NUM_THREADS"] = "1"
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=scaled(110), check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def alone(folder: Path, example: str, *options: str, code: int = 0) -> tuple[str, str]:
    return run([interpreter(example), str(ROOT / "examples" / (example + ".py")), *options], folder, code)


MISTAKES = """\
import json, os, runpy, sys
import torch  # once: it takes most of the time of a program that only complains
for number, (script, *options) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        for descriptor in (1, 2):
            os.dup2(os.open(f"{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        sys.argv, sys.path[0] = [script, *options], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # before the next fork copies it
"""


def mistaken(folder: Path, *wrong: Sequence[str]) -> list[tuple[int, str]]:
    """Run examples with torch, each given with its options; return the exit code of each and what it says."""
    words = json.dumps([[str(ROOT / "examples" / (example + ".py")), *options] for example, *options in wrong])
    output, _ = run([python_of("torch"), "-c", MISTAKES, words], folder)
    return [(int(code), (folder / str(number)).read_text()) for number, code in enumerate(output.split())]


def launched(folder: Path, example: str, *options: str) -> list[str]:
    """Return what worker 0 and worker 1 of a job print."""
    launch = [sys.executable, "-m", "distrun", "launch", "-n", "2", "-s", "2", "--launcher", "local"]
    script = str(ROOT / "examples" / (example + ".py"))
    output, _ = run([*launch, interpreter(example), script, *options], folder)
    lines = [line.partition(" | ") for line in output.splitlines()]
    return ["\n".join(text for who, _, text in lines if who.startswith("worker-%d@" % rank)) for rank in range(2)]


def values(output: str) -> list[float]:
    """Return what was printed of each epoch: its accuracy or its loss."""
    found = EPOCH.findall(output)
    assert [int(epoch) for epoch, _ in found] == list(range(len(found)))
    assert found, output
    return [float(value) for _, value in found]


@pytest.mark.peers
def test_train_mnist_learns_the_digits_alone(tmp_path: Path) -> None:
    output, said = alone(tmp_path, "train_mnist", "--network", "lenet", "--kv-store", "local", "--epochs", "2")
    assert values(output)[-1] >= 0.85
    assert "Total number of workers: 1\nThis worker's rank: 0\n" in output
    assert "the 1797 digits of scikit-learn stand in for MNIST" in said


@pytest.mark.peers
def test_train_mnist_learns_as_a_job(tmp_path: Path) -> None:
    outputs = launched(tmp_path, "train_mnist", "--network", "mlp", "--kv-store", "dist_sync", "--epochs", "8")
    for rank, output in enumerate(outputs):
        assert output.startswith("Total number of workers: 2\nThis worker's rank: %d\n" % rank)
        assert values(output)[-1] >= 0.85
    # dist_sync: after each epoch all have the same weights.
    assert values(outputs[0]) == values(outputs[1])


@pytest.mark.peers
def test_train_mnist_reads_the_files_of_the_database(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("train", 256), ("t10k", 64)):
        labels = rng.integers(10, size=count, dtype=np.uint8)
        images = np.zeros((count, 28, 28), np.uint8)
        images[np.arange(count), 2 * labels + 3] = 255  # a bar, the lower the higher the digit
        (tmp_path / (name + "-images-idx3-ubyte")).write_bytes(
            struct.pack(">4I", 0x803, count, 28, 28) + images.tobytes()
        )
        (tmp_path / (name + "-labels-idx1-ubyte")).write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())
    output, said = alone(
        tmp_path, "train_mnist", "--data-dir", str(tmp_path), "--num-epochs", "8", "--batch-size", "32"
    )
    assert values(output)[-1] >= 0.95
    assert said == ""


@pytest.mark.peers
def test_image_classification_learns_alone(tmp_path: Path) -> None:
    options = ("--dataset", "cifar10", "--model", "resnet18", "--epochs", "3", "--kvstore", "local", *CIFAR)
    output, said = alone(tmp_path, "image_classification", *options, "--batch-size", "16")
    assert output.startswith("Total number of workers: 1\nThis worker's rank: 0\n")
    assert values(output)[-1] >= 0.7
    assert "made-up patterns in 10 classes stand in for the images of CIFAR-10" in said


@pytest.mark.peers
def test_image_classification_learns_as_a_job_by_the_seeds_command(tmp_path: Path) -> None:
    options = ("--dataset", "cifar10", "--model", "vgg11", "--epochs", "1", "--kvstore", "dist_sync")
    for output in launched(tmp_path, "image_classification", *options, "--width", "4", "--batch-size", "16"):
        (accuracy,) = values(output)
        assert accuracy >= 0.7


@pytest.mark.peers
def test_image_classification_takes_the_dtype_and_the_model_of_mxnets_program(tmp_path: Path) -> None:
    options = ["--dataset", "cifar10", "--model", "resnet18_v1", "--dtype", "float16", "--epochs", "1"]
    output, _ = alone(tmp_path, "image_classification", *options, "--train-size", "40", "--width", "1")
    assert len(values(output)) == 1


@pytest.mark.peers
def test_cifar10_dist_prints_the_lines_of_its_sample_run_as_a_job(tmp_path: Path) -> None:
    outputs = launched(tmp_path, "cifar10_dist", "--epochs", "4", *CIFAR, "--batch-size", "16")
    for rank, output in enumerate(outputs):
        assert re.fullmatch(
            r"Total number of workers: 2\nThis worker's rank: %d(\nEpoch \d: Test_acc \d\.\d{6}){4}" % rank, output
        )
        # Chance is 0.1.
        assert values(output)[-1] >= 0.4


# Calls of MXNet's tutorial "Distributed Training using Gluon" (ResNet-18 on CIFAR-10). For the options of our program
# it has numbers: `TUTORIAL_NUMBERS`.
TUTORIAL = """
store = kv.create('dist')
print("Total number of workers: %d" % store.num_workers)
print("This worker's rank: %d" % store.rank)
SplitSampler(50000, store.num_workers, store.rank)
ctx = [mx.gpu(i) for i in range(gpus_per_machine)]
data = batch[0]
data = gluon.utils.split_and_load(data, ctx)
label = batch[1]
label = gluon.utils.split_and_load(label, ctx)
forward_backward(net, data, label)
this_batch_size = batch[0].shape[0]
loss = gluon.loss.SoftmaxCrossEntropyLoss()
with autograd.record():
    losses = [loss(net(X), Y) for X, Y in zip(data, label)]
for batch in train_data:
    train_batch(batch, ctx, net, trainer)
"""
TUTORIAL_NUMBERS = {"options.kv_store": "'dist'", "options.train_size": "50000"}

MXNETS_IMPORTS = (
    "import mxnet as mx\nfrom mxnet import autograd, gluon, kv, nd\nfrom mxnet.gluon.model_zoo import vision\n"
)
OUR_IMPORTS = "import mxnet_names as mx\nfrom mxnet_names import autograd, gluon, kv, nd, vision\n"


def gluons(imports: str) -> str:
    """Return the program of the tutorial with these imports."""
    program = (ROOT / "examples" / "cifar10_gluon.py").read_text("utf-8")
    assert program.count(OUR_IMPORTS) == 1
    return program.replace(OUR_IMPORTS, imports)


@pytest.fixture(scope="module")
def cifar10_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes files of the form, the names and the size of CIFAR-10's: ten coarse patterns of colours in noise."""
    folder, rng = tmp_path_factory.mktemp("cifar10"), np.random.default_rng(0)
    classes = rng.integers(192, size=(10, 3, 4, 4), dtype=np.uint8).repeat(8, axis=2).repeat(8, axis=3)
    for name in [*("data_batch_%d.bin" % number for number in range(1, 6)), "test_batch.bin"]:
        labels = rng.integers(10, size=10000, dtype=np.uint8)
        images = classes[labels] + rng.integers(64, size=(10000, 3, 32, 32), dtype=np.uint8)
        np.concatenate([labels[:, None], images.reshape(10000, 3072)], axis=1).tofile(folder / name)
    return folder


SMALL_GLUON = ("--width", "4", "--batch-size", "16", "--epochs", "1")


def test_the_program_of_the_tutorial_has_its_calls_and_other_imports() -> None:
    program = ast.parse(gluons(MXNETS_IMPORTS))
    imported = {each.module for each in ast.walk(program) if isinstance(each, ast.ImportFrom)}
    imported |= {name.name for each in ast.walk(program) if isinstance(each, ast.Import) for name in each.names}
    # Our own are the command line and what is said of mistakes; what learns is all MXNet's.
    assert imported == {"__future__", "argparse", "arguments", "random", "mxnet", "mxnet.gluon.model_zoo"}

    text = ast.unparse(program)
    for option, number in TUTORIAL_NUMBERS.items():
        text = text.replace(option, number)
    there = {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.stmt, ast.expr))}
    assert [ast.unparse(shown) for shown in ast.parse(TUTORIAL).body if ast.unparse(shown) not in there] == []


@pytest.mark.peers
def test_with_other_imports_the_program_of_the_tutorial_learns_as_a_job(tmp_path: Path, cifar10_files: Path) -> None:
    options = ("--data-dir", str(cifar10_files), *SMALL_GLUON, "--train-size", "2048")
    for rank, output in enumerate(launched(tmp_path, "cifar10_gluon", *options)):
        assert re.fullmatch(
            r"Total number of workers: 2\nThis worker's rank: %d\nEpoch 0: Test_acc \d\.\d{6}" % rank, output
        )
        # Chance is 0.1; ten thousand images that no worker has trained on.
        assert values(output)[-1] >= 0.4


@pytest.mark.peers
def test_with_mxnets_imports_the_program_of_the_tutorial_learns_under_mxnet(
    tmp_path: Path, cifar10_files: Path
) -> None:
    # MXNet takes no files but those whose checksums it knows.
    head = "import mxnet.gluon.data.vision.datasets as known\nknown.check_sha1 = lambda *_: True\n"
    body = gluons(MXNETS_IMPORTS).partition("from __future__ import annotations\n")[2]
    (tmp_path / "program.py").write_text(head + body, "utf-8")
    (tmp_path / "arguments.py").symlink_to(ROOT / "examples" / "arguments.py")
    options = ("--data-dir", str(cifar10_files), *SMALL_GLUON, "--train-size", "2048", "--kv-store", "local")
    output, _ = run([python_of("mxnet"), "program.py", *options], tmp_path)
    assert values(output)[-1] >= 0.4


def test_the_images_of_cifar10_are_read_from_the_folder_that_is_given(tmp_path: Path) -> None:
    for number, name in enumerate(["data_batch_%d.bin" % i for i in range(1, 6)] + ["test_batch.bin"]):
        (tmp_path / name).write_bytes(b"".join(bytes([label]) + bytes([number]) * 3072 for label in range(3)))
    text = """\
import sys
sys.path.insert(0, sys.argv[1])
import datasets
train, test = datasets.cifar10(sys.argv[2], train_size=4)
print(len(train), train[3][0].shape, train[3][1], round(float(train[3][0].max() * 255)), len(test))
"""
    output, said = run([sys.executable, "-c", text, str(ROOT / "examples"), str(tmp_path)], tmp_path)
    assert output == "4 (3, 32, 32) 0 1 3\n"
    assert said == ""


@pytest.mark.slow
def test_linear_async_finds_the_line_alone_and_as_a_job(tmp_path: Path) -> None:
    output, _ = alone(tmp_path, "linear_async", "--kv-store", "local")
    assert values(output)[0] > 0.1
    for found in (output, *launched(tmp_path, "linear_async")):
        # The noise is 0.01, so its square is what remains.
        assert values(found)[-1] < 0.001
        weight = re.search(r"^weight (\S+) (\S+), bias (\S+)$", found, re.MULTILINE)
        assert weight
        np.testing.assert_allclose([float(number) for number in weight.groups()], [2, -3.4, 4.2], atol=0.02)


@pytest.mark.slow
def test_sparse_embedding_learns_alone_and_as_a_job(tmp_path: Path) -> None:
    output, _ = alone(tmp_path, "sparse_embedding", "--epochs", "2")
    assert values(output)[-1] >= 0.8
    for found in launched(tmp_path, "sparse_embedding", "--kv-store", "dist_sync", "--epochs", "2"):
        assert values(found)[-1] >= 0.78


@pytest.mark.peers
def test_two_devices_train_as_one_does(tmp_path: Path) -> None:
    """Two networks on the CPU stand in for two GPUs: each batch is cut, and the gradients are added up."""
    text = """\
import runpy, sys
import networks
devices = sys.argv.pop(1).split(",")
networks.devices_of = lambda gpus: devices
runpy.run_path(%r, run_name="__main__")
""" % str(ROOT / "examples" / "train_mnist.py")
    (tmp_path / "networks.py").symlink_to(ROOT / "examples" / "networks.py")
    (tmp_path / "datasets.py").symlink_to(ROOT / "examples" / "datasets.py")
    (tmp_path / "arguments.py").symlink_to(ROOT / "examples" / "arguments.py")
    one, two = (
        values(run([interpreter("train_mnist"), "-c", text, devices, "--epochs", "4"], tmp_path)[0])
        for devices in ("cpu", "cpu,cpu")
    )
    assert two[-1] >= 0.8
    # Only the order of the sums differs; four images of 360 may fall to the other side.
    np.testing.assert_allclose(two, one, atol=4 / 360)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_has_both_spellings_of_the_stores_option(example: str) -> None:
    text = (ROOT / "examples" / (example + ".py")).read_text("utf-8")
    assert re.search(r'add_argument\("--(kv-store", "--kvstore|kvstore", "--kv-store)"', text)


@pytest.mark.peers
def test_gpus_are_numbers_with_commas_that_are_there(tmp_path: Path) -> None:
    given = ("0,97", "x", "0,,1")
    absent, *others = mistaken(tmp_path, *(("train_mnist", "--gpus", gpus) for gpus in given))
    assert absent[0] == 1
    assert re.search(r"--gpus 0,97: torch sees \d+ GPUs here and none is (0|97); .* leave --gpus out", absent[1])
    for gpus, (code, said) in zip(given[1:], others, strict=True):
        assert code == 2
        assert "--gpus: %r is not a list of GPU numbers such as 0,2" % gpus in said
        assert "Traceback" not in said


@pytest.mark.peers
def test_more_images_than_cifar_10_has_and_a_negative_number_of_gpus_are_refused(tmp_path: Path) -> None:
    wrong = {"--train-size": ("60000", "from 1 to 50000"), "--gpus-per-machine": ("-1", "of at least 0")}
    given = [("cifar10_gluon", "--data-dir", ".", option, number) for option, (number, _) in wrong.items()]
    for (option, (number, expected)), (code, said) in zip(wrong.items(), mistaken(tmp_path, *given), strict=True):
        assert code == 2
        assert f"error: argument {option}: {number!r} is not a whole number {expected}\n" in said


@pytest.mark.parametrize(
    ("example", "options", "expected"),
    [
        ("linear_async", (), r"a dist store needs a job"),
        ("digits", ("--kv-store", "dist_sync"), r"a dist store needs a job"),
        ("digits", ("--lr", "nan"), r"learning_rate=nan: expected a finite number at least 0"),
        ("digits", ("--epochs", "1", "--save-weights", "missing/w"), r"No such file or directory: 'missing/w'"),
        ("sparse_embedding", ("--batch-size", "99999"), r"20000 examples are not one batch of 99999"),
    ],
    ids=str,
)
def test_what_a_user_can_mend_is_said_in_a_line(
    tmp_path: Path, example: str, options: tuple[str, ...], expected: str
) -> None:
    _, said = alone(tmp_path, example, *options, code=1)
    assert re.search(r"^%s\.py: .*%s" % (example, expected), said, re.MULTILINE), said
    assert "Traceback" not in said


@pytest.mark.peers
def test_what_a_user_of_torch_can_mend_is_said_in_a_line(tmp_path: Path) -> None:
    wrong = {
        ("cifar10_dist",): r"a dist store needs a job: .* Start the program with `distrun launch -n 2",
        ("train_mnist", "--data-dir", "missing"): r"there is no train-images-idx3-ubyte .* in missing",
        ("train_mnist", "--batch-size", "9999"): r"1437 examples are not one batch of 9999 .* smaller batch size",
        ("image_classification", "--data-dir", "missing"): r"there is no data_batch_1\.bin in missing",
    }
    for (example, *_), expected, (code, said) in zip(wrong, wrong.values(), mistaken(tmp_path, *wrong), strict=True):
        assert code == 1
        assert re.search(r"^%s\.py: .*%s" % (example, expected), said, re.MULTILINE), said
        assert "Traceback" not in said


@pytest.mark.peers
def test_a_worker_that_fails_so_is_a_failure_to_the_others(tmp_path: Path) -> None:
    """cifar10_dist leaves its store open: the error itself has to get to the interpreter's hook."""
    text = """\
import os, runpy, sys
sys.path.insert(0, %r)
import datasets
made = datasets.cifar10

def cifar10(*options):
    if os.environ["DMLC_RANK"] == "1":
        raise FileNotFoundError("there is no data here")
    return made(*options)

datasets.cifar10 = cifar10
runpy.run_path(%r, run_name="__main__")
""" % (str(ROOT / "examples"), str(ROOT / "examples" / "cifar10_dist.py"))
    launch = [sys.executable, "-m", "distrun", "launch", "-n", "2", "-s", "1", "--launcher", "local"]
    output, said = run([*launch, python_of("torch"), "-c", text, *CIFAR, "--epochs", "1"], tmp_path, code=1)
    assert "Traceback" not in output + said
    assert re.search(r"^worker-1@\S+ \| cifar10_dist\.py: there is no data here$", said, re.MULTILINE)
    assert re.search(r"worker-1 on \S+ failed with exit code 1: FileNotFoundError: there is no data here", said)


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name not in TORCH])
def test_an_option_that_does_not_fit_ends_an_example_without_a_traceback(tmp_path: Path, example: str) -> None:
    _, said = alone(tmp_path, example, "--kv-store", "dist_synk", code=2)
    _, more = alone(tmp_path, example, "--batch-size", "0", code=2)
    check_options_are_refused(said, more)


@pytest.mark.peers
def test_an_option_that_does_not_fit_ends_an_example_with_torch_without_a_traceback(tmp_path: Path) -> None:
    wrong = [(example, *option) for example in TORCH for option in (("--kv-store", "dist_synk"), ("--batch-size", "0"))]
    found = mistaken(tmp_path, *wrong)
    assert [code for code, _ in found] == [2] * len(wrong)
    for number in range(0, len(found), 2):
        check_options_are_refused(found[number][1], found[number + 1][1])


def check_options_are_refused(store: str, batch: str) -> None:
    """Check what is said of an unknown store and of an empty batch."""
    assert re.search(r"invalid choice: 'dist_synk' \(choose from .*dist_async", store)
    assert re.search(r"error: .*--batch-size.* at least 1$", batch, re.MULTILINE)
    assert "Traceback" not in store + batch


def test_the_readme_of_the_examples_names_each() -> None:
    text = (ROOT / "examples" / "README.md").read_text("utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert "`%s`" % path.name in text, path.name
