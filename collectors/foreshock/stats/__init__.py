"""Tensors → numbers: every statistic of a pair of log-prob streams, exactly mergeable over micro-batches and ranks.

`pair` reduces tensors and needs torch, the host's own; `record` and `merge` are numpy and msgspec, for both sides of
the wire.
"""
