"""`foreshock launch`: supervises a job in which no rollback exists: stops it, and restarts it at a checkpoint."""
