"""How this machine reaches others by ssh: the user's own configuration, two transports, failures with their fix."""
