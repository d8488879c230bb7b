"""Ask standing questions (watches) of cameras, and send an event when the answer changes."""
