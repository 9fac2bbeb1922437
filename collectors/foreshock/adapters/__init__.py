"""One host framework a file (or folder); `registry` lists them. Nothing is imported before it is asked for."""
