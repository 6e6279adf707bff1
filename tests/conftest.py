"""Fixtures that every test may ask for."""

from lab import lab, lab_of_session, pytest_pyfunc_call

__all__ = ["lab", "lab_of_session", "pytest_pyfunc_call"]
