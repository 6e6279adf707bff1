"""Shapes of the tensors (float32) that a benchmark round moves: the parameters of two models, and three extremes."""

from __future__ import annotations

from typing import Callable, Dict, List, Tuple

Shape = Tuple[int, ...]


def resnet50() -> List[Shape]:
    """ResNet-50 (He et al. 2015, table 1), batch normalisation included: 161 tensors, 102 MB."""
    shapes: List[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for middle, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = middle * 4
        for block in range(blocks):
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            for shape in ((middle, inputs, 1, 1), (middle, middle, 3, 3), (outputs, middle, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            inputs = outputs
    return [*shapes, (1000, 2048), (1000,)]


def vgg16() -> List[Shape]:
    """VGG-16 (Simonyan and Zisserman 2014, configuration D): 32 tensors, 553 MB, most of it in one."""
    shapes: List[Shape] = []
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(outputs, inputs, 3, 3), (outputs,)]
        inputs = outputs
    for features, outputs in ((25088, 4096), (4096, 4096), (4096, 1000)):
        shapes += [(outputs, features), (outputs,)]
    return shapes


def small() -> List[Shape]:
    """A thousand tensors of 1 KB: the cost of a message."""
    return [(256,)] * 1000


def many() -> List[Shape]:
    """A hundred thousand tensors of 4 floats: the cost of a key."""
    return [(4,)] * 100000


def one() -> List[Shape]:
    """One tensor of 67 MB: the cost of a byte."""
    return [(4096, 4096)]


MODELS: Dict[str, Callable[[], List[Shape]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "small": small,
    "many": many,
    "one": one,
}


def named(text: str) -> List[Shape]:
    """Return the shapes of a model, or of KEYSxFLOATS."""
    if text in MODELS:
        return MODELS[text]()
    keys, floats = text.split("x")
    return [(int(floats),)] * int(keys)
