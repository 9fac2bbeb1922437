"""`foreshock doctor CONFIG`: reads a training configuration and says what it implies. Static: nothing is run.

`hosts` lists the frameworks: one file each (`roll`, `verl`, …) with `recognises(document)` and
`examine(document, version)`.
"""
