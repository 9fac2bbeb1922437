"""Commands → trainer: asked for by the controller, executed at step boundaries, within what the host consented to."""
