"""Supervises a job: what to start, what a death means, when all is over. Standard library only, Python 3.8."""
