"""The room both sides enter: plan, environment table, agent frames. Standard library only, Python 3.8."""
