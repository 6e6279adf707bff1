"""Train ResNet-18 on CIFAR-10 by a program for MXNet's Gluon; only its imports differ.

    distrun launch -n 2 -s 2 -H hosts --sync-dst-dir '~/cifar10' \\
        "python examples/cifar10_gluon.py --data-dir /data/cifar10 --gpus-per-machine 4"

The calls are those of MXNet's tutorial "Distributed Training using Gluon". There the imports are

    import mxnet as mx
    from mxnet import autograd, gluon, kv, nd
    from mxnet.gluon.model_zoo import vision
"""

from __future__ import annotations

import argparse
import random

import arguments
import mxnet_names as mx
from mxnet_names import autograd, gluon, kv, nd, vision


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    stores = ["local", "device", "dist", "dist_sync", "dist_async"]
    parser.add_argument("--kv-store", "--kvstore", choices=stores, default="dist", help="default dist")
    parser.add_argument("--data-dir", metavar="DIR", required=True, help="has CIFAR-10's binary files")
    gpus = arguments.whole(0)
    parser.add_argument("--gpus-per-machine", type=gpus, default=0, metavar="N", help="default 0: train on the CPU")
    parser.add_argument("--epochs", type=arguments.positive, default=5)
    parser.add_argument("--batch-size", type=arguments.positive, default=64, help="of each device (default 64)")
    parser.add_argument("--width", type=arguments.positive, default=64, help="channels of the first layer")
    images = arguments.whole(1, 50000)
    parser.add_argument("--train-size", type=images, default=50000, metavar="N", help="use the first N images only")
    return parser.parse_args()


class SplitSampler(gluon.data.sampler.Sampler):
    """Gives the examples of one part of the data, each once, in random order."""

    def __init__(self, length, num_parts=1, part_index=0):
        part = length // num_parts
        self.positions = range(part_index * part, part_index * part + part)

    def __iter__(self):
        return iter(random.sample(self.positions, len(self.positions)))

    def __len__(self):
        return len(self.positions)


def transform(data, label):
    """Return an image with the colours first, pixels from 0 to 1, and its label."""
    return nd.transpose(data.astype("float32"), (2, 0, 1)) / 255, label


loss = gluon.loss.SoftmaxCrossEntropyLoss()


def forward_backward(net, data, label):
    """Compute the gradients on each device."""
    with autograd.record():
        losses = [loss(net(X), Y) for X, Y in zip(data, label)]  # noqa: B905  # the tutorial's
    for l in losses:  # noqa: E741
        l.backward()


def train_batch(batch, ctx, net, trainer):
    """Cut a batch for the devices, and make a step with all of it."""
    data = batch[0]
    data = gluon.utils.split_and_load(data, ctx)
    label = batch[1]
    label = gluon.utils.split_and_load(label, ctx)
    forward_backward(net, data, label)
    this_batch_size = batch[0].shape[0]
    trainer.step(this_batch_size)


def evaluate(net, batches, device):
    """Return the share of images whose label the network finds."""
    found = mx.metric.Accuracy()
    for data, label in batches:
        (images,) = gluon.utils.split_and_load(data, [device])
        found.update(label, net(images))
    return found.get()[1]


def main():
    """Train, and print the test accuracy after each epoch."""
    options = parse()
    store = kv.create(options.kv_store)
    print("Total number of workers: %d" % store.num_workers)
    print("This worker's rank: %d" % store.rank)

    gpus_per_machine = options.gpus_per_machine
    ctx = [mx.gpu(i) for i in range(gpus_per_machine)]
    ctx = ctx or [mx.cpu()]
    width = options.width
    channels = [width, width, 2 * width, 4 * width, 8 * width]
    net = vision.ResNetV1(vision.BasicBlockV1, [2, 2, 2, 2], channels, classes=10, thumbnail=True)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.001}, kvstore=store)

    batch_size = options.batch_size * len(ctx)
    train_data = gluon.data.DataLoader(
        gluon.data.vision.CIFAR10(options.data_dir, train=True, transform=transform),
        batch_size,
        sampler=SplitSampler(options.train_size, store.num_workers, store.rank),
    )
    test_data = gluon.data.DataLoader(
        gluon.data.vision.CIFAR10(options.data_dir, train=False, transform=transform), batch_size
    )
    for epoch in range(options.epochs):
        for batch in train_data:
            train_batch(batch, ctx, net, trainer)
        print("Epoch %d: Test_acc %f" % (epoch, evaluate(net, test_data, ctx[0])), flush=True)


if __name__ == "__main__":
    arguments.run(main)
