"""Train ResNet-18 on CIFAR-10 on several machines, each with several GPUs.

    distrun launch -n 2 -s 2 -H hosts --sync-dst-dir '~/cifar10' "python examples/cifar10_dist.py --gpus 0,1,2,3"

What distributed training adds to a program for one machine: a store (1), a trainer that uses it (2), and a sampler that
gives each worker its part of the data (3).
"""

from __future__ import annotations

import argparse

import arguments
import datasets
import networks
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from distrun_runtime import kvstore
from distrun_runtime.data import SplitSampler, split_and_load
from distrun_runtime.trainer import Trainer


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-store", "--kvstore", choices=kvstore.TYPES, default="dist", help="default dist")
    parser.add_argument("--data-dir", metavar="DIR", help="has CIFAR-10's binary files; else a small stand-in is made")
    parser.add_argument("--gpus", type=arguments.gpus, metavar="LIST", help="such as 0,1; without it, the CPU")
    parser.add_argument("--epochs", type=arguments.positive, default=5)
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=64, help="images a GPU takes for a step (default 64)"
    )
    parser.add_argument(
        "--width", type=arguments.positive, default=64, help="channels of the first layer; 8 is quick on a CPU"
    )
    parser.add_argument("--train-size", type=arguments.positive, metavar="N", help="train on the first N images")
    return parser.parse_args()


def forward_backward(nets: list[torch.nn.Module], images: list[torch.Tensor], labels: list[torch.Tensor]) -> None:
    """Compute the gradients of the mean loss on each GPU."""
    for net, x, y in zip(nets, images, labels, strict=True):
        net.zero_grad()
        functional.cross_entropy(net(x), y).backward()


def main() -> None:
    """Train, and print the test accuracy after each epoch."""
    options = parse()
    store = kvstore.create(options.kv_store)  # 1
    print("Total number of workers: %d" % store.num_workers, flush=True)
    print("This worker's rank: %d" % store.rank, flush=True)

    devices = networks.devices_of(options.gpus)
    torch.manual_seed(0)
    nets, params = networks.replicas_of(networks.resnet18(options.width), devices)
    trainer = Trainer(params, "adam", {"learning_rate": 0.001}, kvstore=store)  # 2

    train_set, test_set = datasets.cifar10(options.data_dir, options.train_size)
    sampler = SplitSampler(len(train_set), store.num_workers, store.rank)  # 3
    train = DataLoader(train_set, options.batch_size * len(devices), sampler=sampler, drop_last=True)
    test = DataLoader(test_set, 256)

    for epoch in range(options.epochs):
        for data, label in train:
            forward_backward(nets, split_and_load(data, devices), split_and_load(label, devices))
            trainer.step()
        print("Epoch %d: Test_acc %f" % (epoch, networks.accuracy(nets[0], test)), flush=True)
    store.close()


if __name__ == "__main__":
    arguments.run(main)
