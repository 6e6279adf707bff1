"""Where arrays live: devices, and the element types that arrays have."""
