#!/bin/bash
# A job of distrun: starts one agent on each node of this allocation, and ends when they have ended. The agents dial the
# coordinator, which runs where `distrun launch` was typed; they get their work from it.
# Lines of your own (#SBATCH, module load) go here.

# srun is sent these too, and hands them to the agents, which --forward-signal tells what to do.
trap '' USR1 USR2

# What srun would take for its own options:
unset ${!SLURM_MEM_*} SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
unset SLURM_HINT SLURM_THREADS_PER_CORE SLURM_DISTRIBUTION SLURM_EXCLUSIVE SLURM_EXACT
# Where nodes see this folder, what the agents cannot tell the coordinator is written to it.
log=@{log}
[ -w "${log%/*}" ] && exec >>"$log" 2>&1
@{secret}
agent=(@{agent})
exec @{srun}
