"""What this machine has: checks with fixes, cameras, power."""
