"""Numbers → one record per run, step, role and rank."""
