"""What is measured once per model and written into its bundle. Nothing is yet: policies run on their presets."""
