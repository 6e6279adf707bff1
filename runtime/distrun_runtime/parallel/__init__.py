"""A model over several devices: placement of its layers, a pipeline in one process, stages on workers. Needs torch.

from distrun_runtime.parallel import Pipeline, balance, measure

plan = balance(net, ["cuda:0", "cuda:1"], measure(net, batch))
print(plan)
pipeline = Pipeline(net, plan, micro_batches=4)
loss = criterion(pipeline(batch), target)
loss.backward()
"""

from distrun_runtime.parallel.balance import balance, measure, partition
from distrun_runtime.parallel.pipeline import Pipeline
from distrun_runtime.parallel.stages import LayerCost, Stage, StageDevice, StagePlan, named_layers, place
from distrun_runtime.parallel.workers import StageRank, WorkerPipeline, stage_rank

__all__ = [
    "LayerCost",
    "Pipeline",
    "Stage",
    "StageDevice",
    "StagePlan",
    "StageRank",
    "WorkerPipeline",
    "balance",
    "measure",
    "named_layers",
    "partition",
    "place",
    "stage_rank",
]
