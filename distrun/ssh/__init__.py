"""How this machine reaches others by ssh: the user's own configuration, two transports, failures with their fix."""

FABRIC = "fabric"
OPENSSH = "openssh"
TRANSPORTS = (FABRIC, OPENSSH)
CONNECT_S = 10.0
"""Until a host has answered and shown its key, unless the user's configuration or command line says otherwise."""
