"""Sealed items → the service: a bounded queue, one daemon thread, a disk spool for when the service is away."""
