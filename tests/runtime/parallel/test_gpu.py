"""The pipeline on a GPU: two stages on two streams of it, against the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """\
import json
import sys

import torch
from parallel_program import loss_of, text_model, whole, words

from distrun_runtime.parallel import Pipeline, place

if not torch.cuda.is_available():
    sys.exit("torch finds no GPU")
model, reference = text_model(), text_model()
plan = place(model, {"embed": "gpu:0/0", "rnn.0": "gpu:0/0", "rnn.[12]": "gpu:0/1", "decode": "gpu:0/1"})
pipeline = Pipeline(model, plan, layout="TN", **json.loads(sys.argv[1]))
optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, reference)]
for step in range(20):
    batch = words(30, 64, seed=step)
    for optimizer in optimizers:
        optimizer.zero_grad()
    output = pipeline(batch)
    loss_of(output, batch.cuda()).backward()
    expected, _ = whole(reference, batch)
    loss_of(expected, batch).backward()
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-8, atol=1e-8)
    for optimizer in optimizers:
        optimizer.step()
for found, own in zip(model.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(found.cpu(), own, rtol=1e-8, atol=1e-8)
print("trained")
"""


@pytest.mark.gpu
@pytest.mark.peers
@pytest.mark.parametrize(
    "options", ['{"micro_batches": 3}', '{"time_chunks": 5}', '{"micro_batches": 2, "time_chunks": 3}']
)
def test_two_streams_of_a_gpu_train_as_the_cpu(options: str) -> None:
    path = os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "tests" / "support")])
    command = [python_of("torch"), "-c", PROGRAM, options]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(110), check=False)
    if "torch finds no GPU" in done.stderr:
        pytest.skip("torch finds no GPU")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
