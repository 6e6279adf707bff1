"""What `distrun doctor` finds out about hosts: `examine` asks, everything else judges and is pure."""
