"""`foreshock check`: the rules over logs that people already have, no integration.

    file → readers (one a format) → assemble (rows of a step together) → aliases (their names to ours)
         → judge (the rule engine, incidents) → story and render

Everything streams: memory does not grow with the log.
"""
