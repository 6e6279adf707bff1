"""Train a network on handwritten digits, with any type of key-value store.

Alone:            python examples/train_mnist.py --network lenet
With a launcher:  distrun launch -n 2 -H hosts python examples/train_mnist.py --network lenet --kv-store dist_sync

With n workers and batch size b, `dist_sync` does what one process does with batch size n*b.
"""

from __future__ import annotations

import argparse

import arguments
import datasets
import networks
import torch
from torch.nn import functional

from distrun_runtime import kvstore
from distrun_runtime.data import Reader, epoch_size, split_and_load
from distrun_runtime.trainer import Trainer


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", choices=["mlp", "lenet"], default="mlp")
    parser.add_argument("--kv-store", "--kvstore", choices=kvstore.TYPES, default="local", help="default local")
    parser.add_argument("--gpus", type=arguments.gpus, metavar="LIST", help="such as 0,2; without it, the CPU")
    parser.add_argument("--data-dir", metavar="DIR", help="has MNIST's four idx files; else scikit-learn's digits")
    parser.add_argument("--epochs", "--num-epochs", type=arguments.positive, default=10)
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=64, help="images a worker takes for a step (default 64)"
    )
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default 0.05)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--train-size", type=arguments.positive, metavar="N", help="train on the first N images")
    return parser.parse_args()


def main() -> None:
    """Train with the store that was asked for."""
    options = parse()
    with kvstore.create(options.kv_store) as kv:
        devices = networks.devices_of(options.gpus)
        print("Total number of workers: %d" % kv.num_workers, flush=True)
        print("This worker's rank: %d" % kv.rank, flush=True)

        # In each epoch all examples are dealt anew; all workers make the same number of steps, with full batches.
        train_set, test_set = datasets.mnist(options.data_dir, options.train_size)
        size = epoch_size(len(train_set), options.batch_size, kv.num_workers)
        part = {"num_parts": kv.num_workers, "part_index": kv.rank, "remainder": "drop"}
        rest = {"shuffle": "global", "seed": 0, "last_batch": "discard"}
        train = Reader(train_set, options.batch_size, **part, epoch_size=size, **rest)
        test = Reader(test_set, 256)

        torch.manual_seed(0)
        net = {"mlp": networks.mlp, "lenet": networks.lenet}[options.network]()
        nets, params = networks.replicas_of(net, devices)
        trainer = Trainer(params, "sgd", {"learning_rate": options.lr, "momentum": options.momentum}, kvstore=kv)
        for epoch in range(options.epochs):
            for data, label in train:
                images = split_and_load(torch.from_numpy(data), devices)
                labels = split_and_load(torch.from_numpy(label), devices)
                for replica, x, y in zip(nets, images, labels, strict=True):
                    replica.zero_grad()
                    functional.cross_entropy(replica(x), y).backward()  # the mean over the batch
                trainer.step()
            print("Epoch %d: Test_acc %f" % (epoch, networks.accuracy(nets[0], test)), flush=True)


if __name__ == "__main__":
    arguments.run(main)
