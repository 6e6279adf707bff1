"""One per host: starts, watches, reaps and ends the tasks there. Standard library only, Python 3.8."""
