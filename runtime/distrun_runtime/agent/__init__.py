"""The agent of a host: starts, watches and ends the tasks of a job there. Standard library only, Python 3.8."""
