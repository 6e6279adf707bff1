"""Messages between the nodes of a job, and how a connection is proven."""
