"""The protocol version: an integer, raised only when an old reader would misread a new body.

Unknown fields are ignored on both sides, so adding a field never needs a new version. `SUPPORTED` holds every version
released in the last twelve months; an older envelope is answered 426 and the SDK drops, counts and logs once.
`tests/contract/golden/` keeps one recorded envelope and reply per version.

1: pair records field by field. 2: each as a block (`foreshock.stats.packed`); fields are still taken, since a spool may
hold frames of an older client.
"""

from __future__ import annotations

PROTOCOL = 2
SUPPORTED = frozenset({1, 2})
