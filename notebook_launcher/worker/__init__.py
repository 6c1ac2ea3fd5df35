"""The worker's side of a run: the fork server, and what a rank does from its first instruction to its last."""
