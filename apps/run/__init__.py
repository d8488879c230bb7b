"""Watch a stream: the run loop, its clock, its output and its process."""
