"""The kernel's side of a run: from options and a function to worker processes, and back to results."""
