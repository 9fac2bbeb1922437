"""`foreshock doctor CONFIG`: reads a training configuration and says what it implies. Static: nothing is run.

One file a framework (`roll`, …), each with `recognises(document)` and `examine(document, version) -> list[Finding]`.
"""
