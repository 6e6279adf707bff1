#!/bin/sh
# Starts the agents of distrun job @{job}: one on each host of @{hosts}.
# mpirun reaches the hosts by ssh, or by the queue system whose allocation this is.
cd / || exit # MPICH wants this folder to exist on every host
exec @{mpirun} \
    @{agent}
