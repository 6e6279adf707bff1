#!/bin/sh
# Starts the agents of distrun job @{job} (@{marker}): one on each host of the file `hosts` beside this one.
# mpirun reaches them by ssh, or by the queue system in whose allocation it runs.
cd / || exit # MPICH wants the current folder to exist on every host
exec @{mpirun} \
    @{agent}
