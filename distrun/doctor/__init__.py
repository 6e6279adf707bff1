"""What `distrun doctor` finds out about hosts: `examine` asks, `checks` judges, `environments` makes what is missing."""
