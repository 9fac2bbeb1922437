"""Experiments inside a live trainer: the same rows scored again under one change at a time, on the host's consent.

A host gives one function, `score(variant) -> log-probs`; `experiment.run` compares. The result is the `probe` command's
detail, and the service's diagnosis shows it as evidence.
"""
