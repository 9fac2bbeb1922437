"""`foreshock demo`: one seed of the lab three times (healthy, ill and left alone, ill and treated), over real HTTP."""
