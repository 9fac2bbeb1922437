"""Diagnosis from single tokens: dumps → the same pair statistics as the SDK's, and what only tokens can tell.

    readers → batches → measure (every step) → calm, onset → inspect (the ill steps) → causes → report

Everything between is mergeable, so that a file read here, a row group at a time, and a thousand read by Ray Data
(`distributed`) give the same report.
"""
