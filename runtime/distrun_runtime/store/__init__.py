"""The stores a training script talks to: what all have in common, and each kind of store."""
