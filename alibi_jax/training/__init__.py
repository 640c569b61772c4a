"""Training: one step, the loop around it, and what the loop needs."""
