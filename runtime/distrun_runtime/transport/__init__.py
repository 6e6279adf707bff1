"""How messages travel: ZeroMQ, within a process, with repeats, with faults on request."""
