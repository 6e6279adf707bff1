"""Rules without sockets or clocks: how values are cut, summed and updated."""
