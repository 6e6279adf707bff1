"""The pipeline on a GPU: two stages on two streams of it, against the CPU."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"time_chunks": 5}, {"micro_batches": 2, "time_chunks": 3}])
def test_two_streams_of_a_gpu_train_as_the_cpu(options: dict[str, int]) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    from parallel_program import loss_of, text_model, whole, words

    from distrun_runtime.parallel import Pipeline, place

    model, reference = text_model(), text_model()
    plan = place(model, {"embed": "gpu:0/0", "rnn.0": "gpu:0/0", "rnn.[12]": "gpu:0/1", "decode": "gpu:0/1"})
    pipeline = Pipeline(model, plan, layout="TN", **options)
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
