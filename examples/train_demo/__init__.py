"""Train the demo model, first its vision tower and then its decoder: `python examples/train_demo --help`."""
