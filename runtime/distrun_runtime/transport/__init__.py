"""How messages travel between nodes: the interface (`base`) and the transports that have it."""
