"""For programs of torch: `import distrun_runtime.torch as dt`. One line wraps the optimizer; nothing else changes.

opt = dt.DistributedOptimizer(opt, net)                   # any optimizer of torch.optim
for x, y in loader:
    F.cross_entropy(net(x), y).backward()                 # p.grad: the mean over the workers
    opt.step()
    opt.zero_grad()
"""

from distrun_runtime import torch_backend
from distrun_runtime.torch.checkpoint import resume, save
from distrun_runtime.torch.ddp_hook import ddp_hook
from distrun_runtime.torch.job import rank, store, world_size
from distrun_runtime.torch.metrics import all, any, mean
from distrun_runtime.torch.optimizer import DistributedOptimizer
from distrun_runtime.torch.sampler import DistributedSampler
from distrun_runtime.torch.server_optimizer import ServerOptimizer

__all__ = [
    "DistributedOptimizer",
    "DistributedSampler",
    "ServerOptimizer",
    "all",
    "any",
    "ddp_hook",
    "mean",
    "rank",
    "resume",
    "save",
    "store",
    "world_size",
]

torch_backend.register()
