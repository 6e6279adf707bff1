"""The processes of a job: scheduler, server, worker, and the loop they share."""
