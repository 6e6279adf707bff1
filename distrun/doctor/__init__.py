"""Examines hosts for `distrun doctor`: `examine` asks, `checks` judges, `environments` makes what is missing."""
