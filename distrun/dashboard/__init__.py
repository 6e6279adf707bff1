"""`distrun status -w` and `distrun top`: a live view of jobs on a terminal.

`loop.watch` shows one job. `jobs.watch` shows a table of jobs, from which the user can open one. `loop.follow` prints a
line for each change.
"""
