"""The rose command."""
