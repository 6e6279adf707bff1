"""distrun: launch distributed training jobs. The submit side: what runs where the user types."""

__version__ = "0.1.0"
