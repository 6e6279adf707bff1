"""The version of distrun."""

__version__ = "0.1.0"
