"""The larger ``bench`` commands and their options."""
