"""Train a convolutional network on small images.

Alone:            python examples/image_classification.py --dataset cifar10 --model vgg11 --epochs 1
With a launcher:  distrun launch -n 3 -H hosts python examples/image_classification.py --dataset cifar10 \\
                      --model vgg11 --epochs 1 --kvstore dist_sync
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
    parser.add_argument("--dataset", choices=["cifar10", "mnist"], default="cifar10")
    parser.add_argument("--data-dir", metavar="DIR", help="has the data set's files; else a small stand-in")
    parser.add_argument("--model", choices=["vgg11", "resnet18", "resnet18_v1", "lenet"], default="resnet18_v1")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32", help="of weights and images")
    parser.add_argument("--epochs", type=arguments.positive, default=10)
    parser.add_argument("--kvstore", "--kv-store", choices=kvstore.TYPES, default="local", help="default local")
    parser.add_argument("--gpus", type=arguments.gpus, metavar="LIST", help="such as 0,2; without it, the CPU")
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=32, help="images a worker takes for a step (default 32)"
    )
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default 0.05)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=0.0001, help="weight decay (default 0.0001)")
    parser.add_argument(
        "--width", type=arguments.positive, default=64, help="channels of the first layer; 8 is quick on a CPU"
    )
    parser.add_argument("--train-size", type=arguments.positive, metavar="N", help="train on the first N images")
    options = parser.parse_args()
    if (options.model == "lenet") != (options.dataset == "mnist"):
        parser.error("lenet is for mnist; vgg11 and resnet18_v1 are for cifar10")
    return options


def network(options: argparse.Namespace) -> torch.nn.Module:
    """Return the model that was asked for, with the same first weights in every run."""
    torch.manual_seed(0)
    if options.model == "lenet":
        net = networks.lenet()
    else:
        net = networks.vgg11(options.width) if options.model == "vgg11" else networks.resnet18(options.width)
    return net.to(getattr(torch, options.dtype))


def main() -> None:
    """Train with the store that was asked for."""
    options = parse()
    load = {"cifar10": datasets.cifar10, "mnist": datasets.mnist}[options.dataset]
    with kvstore.create(options.kvstore) as kv:
        devices = networks.devices_of(options.gpus)
        print("Total number of workers: %d" % kv.num_workers, flush=True)
        print("This worker's rank: %d" % kv.rank, flush=True)

        train_set, test_set = load(options.data_dir, options.train_size)
        train = Reader(
            train_set,
            options.batch_size,
            num_parts=kv.num_workers,
            part_index=kv.rank,
            remainder="drop",
            epoch_size=epoch_size(len(train_set), options.batch_size, kv.num_workers),
            shuffle="global",
            seed=0,
            last_batch="discard",
        )
        nets, params = networks.replicas_of(network(options), devices)
        # As in MXNet's program: with 16-bit weights, the store keeps a float32 master of each.
        halves = {"multi_precision": True} if options.dtype == "float16" else {}
        rule = {"learning_rate": options.lr, "momentum": options.momentum, "wd": options.wd, **halves}
        trainer = Trainer(params, "sgd", rule, kvstore=kv)
        for epoch in range(options.epochs):
            for data, label in train:
                images = split_and_load(torch.from_numpy(data).to(getattr(torch, options.dtype)), devices)
                labels = split_and_load(torch.from_numpy(label), devices)
                for net, x, y in zip(nets, images, labels, strict=True):
                    net.zero_grad()
                    functional.cross_entropy(net(x).float(), y).backward()  # the mean over the batch
                trainer.step()
            print("Epoch %d: Test_acc %f" % (epoch, networks.accuracy(nets[0], Reader(test_set, 256))), flush=True)


if __name__ == "__main__":
    arguments.run(main)
