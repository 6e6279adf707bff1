"""Training with little change: `from distrun_runtime.trainer import Trainer, Parameter, fit`.

trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
...
loss.backward()  # of the mean over the batch
trainer.step()
"""

from distrun_runtime.trainer.fit import fit
from distrun_runtime.trainer.parameters import Parameter
from distrun_runtime.trainer.trainer import Trainer

__all__ = ["Parameter", "Trainer", "fit"]
