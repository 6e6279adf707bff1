"""Arithmetic without sockets or clocks: how values are cut, compressed, summed and updated."""
