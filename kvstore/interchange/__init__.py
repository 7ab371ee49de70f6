"""Rows out of other tools' files into sessions, and back."""
