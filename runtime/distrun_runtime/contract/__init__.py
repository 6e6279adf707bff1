"""What both sides of a job share: plan, environment table, agent frames, facts. Standard library only, Python 3.8."""
