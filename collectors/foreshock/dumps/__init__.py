"""Token dumps: the log-probs of single tokens, kept as Parquet files for `foreshock diagnose`. Off by default."""
