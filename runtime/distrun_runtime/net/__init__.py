"""Messages between the nodes of a job and the sockets that carry them."""
